"""A timeline as text, SVG, HTML or a Chrome trace."""
