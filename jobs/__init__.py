"""What a person or ``ray job submit`` starts: the command line, and what it shows."""
