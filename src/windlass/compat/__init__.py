"""What exists only because scripts of another library use it; nothing below this floor imports it."""
