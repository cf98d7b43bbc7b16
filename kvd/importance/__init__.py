"""What is sent first: importance matrices, groups by prompt length, the budget."""
