"""What training must give, worked out without Penstock.

``nets`` makes random models from values that can be printed, ``plain_loop`` trains one on one
device, ``plain_replay`` trains one with the delays that the papers write down. None of the three
imports anything of Penstock; ``cases`` draws what is compared, and ``comparing`` knows both sides.
"""
