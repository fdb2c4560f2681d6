"""The paper's tables and figures: what has to be run, running it, and setting the outcome beside the paper's own numbers."""
