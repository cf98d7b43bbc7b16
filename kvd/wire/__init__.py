"""What daemons say to each other: messages, framing, and the handshake as a protocol without IO."""
