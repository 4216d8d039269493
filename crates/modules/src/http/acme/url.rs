//! URLs from issuers: `https://host:port/path?query`. A URL with bytes that could end a line of a request is refused.

use std::fmt;

use gale_config::server_address::ServerAddress;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub is_tls: bool,
    /// Host name or address, without brackets.
    pub host: String,
    pub port: u16,
    /// Path and query.
    pub target: String,
}

impl Url {
    /// Parses a URL.
    ///
    /// # Errors
    /// The URL is invalid; the text is in nginx's words.
    pub fn parse(text: &str) -> Result<Url, &'static str> {
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("invalid URL");
        }
        let (scheme, rest) = text.split_once("://").ok_or("invalid URL prefix")?;
        let (is_tls, port) = match scheme.to_ascii_lowercase().as_str() {
            "https" => (true, 443),
            "http" => (false, 80),
            _ => return Err("invalid URL prefix"),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let (server, target) = rest.find(['/', '?']).map_or((rest, ""), |place| rest.split_at(place));
        if server.contains('@') {
            return Err("invalid host");
        }
        let (host, port) = match ServerAddress::parse(server.as_bytes(), port)? {
            ServerAddress::Inet(address) => (address.ip().to_string(), address.port()),
            ServerAddress::Host(host, port) => (host, port),
            ServerAddress::Unix(_) => return Err("invalid host"),
        };
        if host.is_empty() {
            return Err("no host");
        }
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        Ok(Url { is_tls, host, port, target })
    }

    /// Returns `true` if both can be reached over one connection.
    pub fn has_same_origin(&self, other: &Url) -> bool {
        (self.is_tls, self.port, &self.host) == (other.is_tls, other.port, &other.host)
    }

    /// Returns the value of the `Host` field.
    pub fn host_field(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let usual = if self.is_tls { 443 } else { 80 };
        if self.port == usual { host } else { format!("{host}:{}", self.port) }
    }

    /// Returns the URL with one more segment at the end of its path.
    pub fn with_segment(&self, segment: &str) -> Url {
        let separator = if self.target.ends_with('/') { "" } else { "/" };
        Url { target: format!("{}{separator}{segment}", self.target), ..self.clone() }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.host_field(), self.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_written() {
        for (text, shown) in [
            ("https://a.example/directory", "https://a.example/directory"),
            ("HTTPS://a.example:443?x=/y#z", "https://a.example/?x=/y"),
            ("http://127.0.0.1:14000/dir", "http://127.0.0.1:14000/dir"),
            ("https://[::1]:8443", "https://[::1]:8443/"),
        ] {
            assert_eq!(Url::parse(text).unwrap().to_string(), shown);
        }
        for wrong in
            ["", "a.example", "ftp://a.example/", "https:///x", "https://a@b/", "https://a/\r\nX: y", "https://a/ b"]
        {
            assert!(Url::parse(wrong).is_err(), "{wrong}");
        }
        let url = Url::parse("https://a.example/info").unwrap();
        assert_eq!(url.with_segment("x.y").target, "/info/x.y");
    }
}
