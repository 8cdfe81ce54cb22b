"""What hosts of the msProbe drop-in share, whatever the framework."""
