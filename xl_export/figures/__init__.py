"""Pictures that commands draw."""
