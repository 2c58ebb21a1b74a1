"""How a script becomes a job of many processes, and what is said when one of them fails."""
