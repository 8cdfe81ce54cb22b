"""Where finished frames go: one module a sink, driven by one writer thread."""
