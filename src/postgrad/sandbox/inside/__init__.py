"""What runs in the sandbox: started by path, with nothing but the standard library."""
