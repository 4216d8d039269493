//! The `Connection` field: options for the current connection (RFC 9110 §7.6.1).

use crate::request::{KnownHeader, RequestHead, Version};

/// Options from all `Connection` lines of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConnectionOptions {
    /// `close`.
    pub close: bool,
    /// `keep-alive`.
    pub keep_alive: bool,
    /// `upgrade`.
    pub upgrade: bool,
    /// `te`.
    pub te: bool,
}

impl ConnectionOptions {
    /// Adds the options of one field line: comma-separated, case-insensitive tokens. Unknown ones are ignored.
    pub fn add(&mut self, value: &[u8]) {
        // Fast path: nearly always the whole value is one of these.
        match value {
            b"keep-alive" => self.keep_alive = true,
            b"close" => self.close = true,
            list => self.add_list(list),
        }
    }

    fn add_list(&mut self, list: &[u8]) {
        for token in list.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
            match token.len() {
                2 => self.te |= token.eq_ignore_ascii_case(b"te"),
                5 => self.close |= token.eq_ignore_ascii_case(b"close"),
                7 => self.upgrade |= token.eq_ignore_ascii_case(b"upgrade"),
                10 => self.keep_alive |= token.eq_ignore_ascii_case(b"keep-alive"),
                _ => {}
            }
        }
    }
}

/// Returns the options from all `Connection` lines of a request.
pub fn connection_options(head: &RequestHead, input: &[u8]) -> ConnectionOptions {
    let mut options = ConnectionOptions::default();
    for value in head.values(input, KnownHeader::Connection) {
        options.add(value);
    }
    options
}

/// Returns `true` if the client wants to keep the connection open after this request (RFC 9112 §9.3). `close` takes
/// precedence; an HTTP/1.0 client must send `keep-alive`.
pub fn wants_keep_alive(head: &RequestHead, input: &[u8]) -> bool {
    let options = connection_options(head, input);
    match head.version {
        Version::Http09 => false,
        Version::Http10 => options.keep_alive && !options.close,
        // HTTP/2 and HTTP/3 have no such field.
        Version::Http11 | Version::Http2 | Version::Http3 => !options.close,
    }
}

/// Returns `true` if a comma-separated list, such as `Connection` or `Upgrade`, contains this token, case-insensitive
/// (RFC 9110 §5.6.1).
pub fn lists_token(value: &[u8], token: &[u8]) -> bool {
    value.split(|&byte| byte == b',').any(|option| option.trim_ascii().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_tokens_in_lists() {
        let options = |value: &[u8]| {
            let mut options = ConnectionOptions::default();
            options.add(value);
            options
        };
        assert_eq!(options(b"close"), ConnectionOptions { close: true, ..ConnectionOptions::default() });
        assert_eq!(options(b"keep-alive"), ConnectionOptions { keep_alive: true, ..ConnectionOptions::default() });
        assert!(options(b"Keep-Alive, Upgrade").keep_alive);
        assert!(options(b"Keep-Alive, Upgrade").upgrade);
        assert!(options(b" ,, TE\t,x").te);
        assert_eq!(options(b"enclosed, closed, x-close, keep-alives"), ConnectionOptions::default());
        assert!(lists_token(b"X-Hop, close", b"x-hop"));
        assert!(!lists_token(b"X-Hops, close", b"x-hop"));
    }
}
