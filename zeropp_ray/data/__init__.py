"""Text in, micro-batches out: reading and splitting the text, and the order of its samples over the whole run."""
