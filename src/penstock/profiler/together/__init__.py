"""How much longer ranks of one machine take when they work together.

Real pipelines train a copy of the model for a few steps (``runs``), in turns with the layers alone,
round by round until the figures are steady (``calibrating``). How much longer than foreseen their
steps and updates take is contention (``fit``); rounds in which something else disturbed them
(``disturbance``) do not count (``judgement``).
"""
