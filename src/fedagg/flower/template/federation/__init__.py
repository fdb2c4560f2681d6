"""A federation trained with fedagg on Flower."""
