"""Loading and saving the weights of a trained module, and copies of them."""
