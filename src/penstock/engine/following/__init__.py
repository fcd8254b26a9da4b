"""A dimension that members of a group share, followed through recorded graphs.

``dims`` says how a value is divided. A rule says of a recorded operation how its output is divided
where what it is given is, and what a member gives it instead (``rule``); they are of two kinds,
``moves`` of numbers and ``arithmetic``, in one ``table``. ``writer`` walks through a graph by these
rules and writes it anew for one member. Who uses it says what is to be done where no rule helps:
tensor ranks make values whole there, context ranks refuse the model. ``seen_whole`` follows what a
loss does, for which nothing is recorded.
"""
