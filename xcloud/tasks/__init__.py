"""The data half of the paper's task layer: what is learned and how it is scored."""
