"""What a device is asked: to keep freed memory, and how many bytes of activations live on it."""
