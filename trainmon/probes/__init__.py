"""What is measured: one probe a subject. A probe turns events into samples; it never prints and never writes files."""
