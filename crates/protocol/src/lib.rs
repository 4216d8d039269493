//! Sans-I/O codecs: bytes and time in, events and bytes out.
