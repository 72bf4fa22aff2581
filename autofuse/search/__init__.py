"""The search: where to spend the next trial, checking and measuring in a process that can be killed."""
