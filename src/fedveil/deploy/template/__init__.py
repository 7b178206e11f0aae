"""What `fedveil deploy init` copies."""
