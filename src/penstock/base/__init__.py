"""What every other wing stands on: errors, values as files, quantities as text, progress lines."""
