"""What every part of the interface needs: the server, its models and limits, answers and errors."""
