"""What a recipe says, and what it makes: its keys, its rows, its model, and one object for each kind of task."""
