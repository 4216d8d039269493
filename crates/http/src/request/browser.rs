//! Recognises the browsers that nginx treats specially: `keepalive_disable`, `gzip_disable msie6`, `msie_padding`,
//! `msie_refresh`. Only `User-Agent` is read, by nginx's rules.

use memchr::memmem::find;

/// A browser that is treated specially, or any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Browser {
    /// Internet Explorer.
    Msie {
        /// Versions 4 to 6, but not the 6 of Windows XP SP2.
        is_6: bool,
    },
    /// Chrome, and browsers built on it.
    Chrome,
    /// Safari on macOS.
    Safari,
    /// Any other.
    Other,
}

impl Browser {
    /// The browser of this `User-Agent`.
    pub fn of(agent: &[u8]) -> Browser {
        let has = |text: &[u8]| find(agent, text).is_some();
        if has(b"Opera") {
            // Old versions name another browser, too.
            return Browser::Other;
        }
        let msie = find(agent, b"MSIE ").map(|at| &agent[at + b"MSIE ".len()..]);
        if let Some([first, second, rest @ ..]) = msie.filter(|rest| rest.len() > 2) {
            let is_6 = *second == b'.'
                && match first {
                    b'4' | b'5' => true,
                    b'6' => find(rest, b"SV1").is_none(),
                    _ => false,
                };
            return Browser::Msie { is_6 };
        }
        if has(b"Gecko/") {
            Browser::Other
        } else if has(b"Chrome/") {
            Browser::Chrome
        } else if has(b"Safari/") && has(b"Mac OS X") {
            Browser::Safari
        } else {
            Browser::Other
        }
    }

    /// `true` for Internet Explorer 4 to 6, except the 6 of Windows XP SP2.
    pub fn is_msie6(self) -> bool {
        self == Browser::Msie { is_6: true }
    }

    /// `true` for any Internet Explorer.
    pub fn is_msie(self) -> bool {
        matches!(self, Browser::Msie { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_are_what_nginx_takes_them_for() {
        let of = |agent: &str| Browser::of(agent.as_bytes());
        let msie = |is_6| Browser::Msie { is_6 };
        assert_eq!(of("Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.0)"), msie(true));
        assert_eq!(of("Mozilla/4.0 (compatible; MSIE 5.01; Windows 95)"), msie(true));
        assert_eq!(of("Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.1; SV1)"), msie(false));
        assert_eq!(of("Mozilla/5.0 (compatible; MSIE 10.0; Windows NT 6.2)"), msie(false));
        assert_eq!(of("MSIE foo"), msie(false));
        assert_eq!(of("MSIE 6"), Browser::Other);
        assert_eq!(of("Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.1) Opera 8"), Browser::Other);
        assert_eq!(
            of("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/99.0 Safari/537.36"),
            Browser::Chrome
        );
        assert_eq!(
            of(
                "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15) AppleWebKit/605 (KHTML, like Gecko) Version/16 Safari/605"
            ),
            Browser::Safari
        );
        assert_eq!(of("Mozilla/5.0 (X11; Linux x86_64; rv:99.0) Gecko/20100101 Firefox/99.0"), Browser::Other);
        assert_eq!(of(""), Browser::Other);
    }
}
