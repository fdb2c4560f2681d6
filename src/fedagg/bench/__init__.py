"""How fast is fedagg on this machine? Several simulators run the same job, each in its own process."""
