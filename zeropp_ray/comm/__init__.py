"""Communicators: the interface, and its implementation over gloo."""
