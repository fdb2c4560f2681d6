"""The paper's tables and figures: what to run, running it, and setting it beside the paper's numbers."""
