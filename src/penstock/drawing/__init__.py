"""Pictures of a timeline: text, SVG, HTML, Chrome trace. One function, ``draw``, for all."""

from penstock.drawing.draw import draw

__all__ = ["draw"]
