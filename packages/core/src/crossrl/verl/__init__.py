"""The only place that imports verl."""
