"""The ground of every other wing: errors, values as files, quantities as text, progress lines."""
