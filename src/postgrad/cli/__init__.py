"""The command line: `main` declares the commands, one module each runs them, `console` prints."""
