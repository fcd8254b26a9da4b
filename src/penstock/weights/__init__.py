"""A stage's weights in as many versions as its policy needs.

``store`` keeps them and says which a pass reads; ``leaves`` puts other tensors in the place of
parameters while it reads them; ``prediction`` foresees where an optimizer is heading.
"""
