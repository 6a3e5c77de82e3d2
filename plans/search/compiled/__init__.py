"""What searches do so often that it is machine code: layouts of recipes, built and priced many at a time."""
