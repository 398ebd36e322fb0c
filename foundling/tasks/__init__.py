"""One object a task: what to ask, and how a reply is graded. No torch."""
