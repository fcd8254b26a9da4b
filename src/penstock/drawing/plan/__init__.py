"""A plan as text, SVG or a page: its devices, what each of them does, and what passes between."""
