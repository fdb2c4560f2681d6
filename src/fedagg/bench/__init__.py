"""How fast is it here? One job, run by several simulators side by side, each in a process of its own."""
