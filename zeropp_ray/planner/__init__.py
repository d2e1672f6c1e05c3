"""What a run will be, before it runs."""
