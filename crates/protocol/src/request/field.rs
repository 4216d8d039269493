//! The header fields that Gale knows by number, so that a request's fields are found without
//! comparing names.
//!
//! Names are case-insensitive (RFC 9110 §5.1). Invariant: the hash below has no collisions; the
//! compiler checks it.

/// Declares the fields, their names, and whether a request may hold each once only.
macro_rules! known_headers {
    ($($variant:ident $name:literal $count:ident),+ $(,)?) => {
        /// A header field that Gale knows by number.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum KnownHeader {
            $(#[doc = $name] $variant,)+
        }

        impl KnownHeader {
            /// Every known field, in the order of its number.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The usual spelling.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// A second line with this name is an offence (as in nginx): the two might be read
            /// differently by two programs.
            pub(crate) const fn is_unique(self) -> bool {
                match self {
                    $(Self::$variant => $count,)+
                }
            }
        }
    };
}

#[allow(non_upper_case_globals)]
mod count {
    pub const once: bool = true;
    pub const many: bool = false;
}
use count::{many, once};

known_headers! {
    Accept "Accept" many,
    AcceptCharset "Accept-Charset" many,
    AcceptEncoding "Accept-Encoding" many,
    AcceptLanguage "Accept-Language" many,
    Authorization "Authorization" once,
    CacheControl "Cache-Control" many,
    Connection "Connection" many,
    ContentEncoding "Content-Encoding" many,
    ContentLength "Content-Length" once,
    ContentRange "Content-Range" once,
    ContentType "Content-Type" many,
    Cookie "Cookie" many,
    Date "Date" many,
    Depth "Depth" many,
    Destination "Destination" many,
    EarlyData "Early-Data" many,
    Expect "Expect" once,
    Forwarded "Forwarded" many,
    Host "Host" many, // judged apart: the offence has its own name
    Http2Settings "HTTP2-Settings" many,
    IfMatch "If-Match" once,
    IfModifiedSince "If-Modified-Since" once,
    IfNoneMatch "If-None-Match" once,
    IfRange "If-Range" once,
    IfUnmodifiedSince "If-Unmodified-Since" once,
    KeepAlive "Keep-Alive" many,
    Origin "Origin" many,
    Overwrite "Overwrite" many,
    Pragma "Pragma" many,
    ProxyAuthorization "Proxy-Authorization" once,
    ProxyConnection "Proxy-Connection" many,
    Range "Range" many,
    Referer "Referer" many,
    Te "TE" many,
    Trailer "Trailer" many,
    TransferEncoding "Transfer-Encoding" once,
    Upgrade "Upgrade" many,
    UpgradeInsecureRequests "Upgrade-Insecure-Requests" many,
    UserAgent "User-Agent" many,
    Via "Via" many,
    XForwardedFor "X-Forwarded-For" many,
    XForwardedHost "X-Forwarded-Host" many,
    XForwardedProto "X-Forwarded-Proto" many,
    XRealIp "X-Real-IP" many,
    XRequestedWith "X-Requested-With" many,
}

/// How many there are; at most 64, so that a set of them is one word.
pub(super) const KNOWN_COUNT: usize = KnownHeader::ALL.len();
const _: () = assert!(KNOWN_COUNT <= 64);

impl KnownHeader {
    /// The known field of that name, whatever its case.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        Self::from_token(name).filter(|_| name.iter().all(|byte| !byte.is_ascii_control()))
    }

    /// Like [`KnownHeader::from_name`] for a name that holds no control characters.
    pub(crate) fn from_token(name: &[u8]) -> Option<Self> {
        let (&first, &last) = (name.first()?, name.last()?);
        let candidate = SLOTS[slot(name.len(), first, last)]?;
        same_but_for_case(name, candidate.name().as_bytes()).then_some(candidate)
    }
}

/// A set of known fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownHeaders(u64);

impl KnownHeaders {
    /// These fields.
    pub const fn of(headers: &[KnownHeader]) -> Self {
        let (mut set, mut index) = (0, 0);
        while index < headers.len() {
            set |= 1 << headers[index] as u8;
            index += 1;
        }
        KnownHeaders(set)
    }

    /// Whether one of them is among `present`, a word with the bit of each field that is there.
    pub(super) fn has_any_of(self, present: u64) -> bool {
        self.0 & present != 0
    }
}

/// Compares eight bytes at a time, leaving out the bit in which capital and small letters differ. Among
/// the bytes of known names that bit otherwise only tells digits and "-" from control characters.
fn same_but_for_case(name: &[u8], known: &[u8]) -> bool {
    if name.len() != known.len() {
        return false;
    }
    let word = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes) | 0x2020_2020_2020_2020;
    let (mut name, mut known) = (name, known);
    while let (Some((a, name_rest)), Some((b, known_rest))) =
        (name.split_first_chunk::<8>(), known.split_first_chunk::<8>())
    {
        if word(a) != word(b) {
            return false;
        }
        (name, known) = (name_rest, known_rest);
    }
    name.iter().zip(known).all(|(a, b)| a | 0x20 == b | 0x20)
}

/// Length, first and last byte tell all known names apart; the factors were found by trying.
const fn slot(length: usize, first: u8, last: u8) -> usize {
    (length + (first | 0x20) as usize * 3 + (last | 0x20) as usize * 58) & 0xff
}

static SLOTS: [Option<KnownHeader>; 256] = {
    let mut slots = [None; 256];
    let mut index = 0;
    while index < KNOWN_COUNT {
        let header = KnownHeader::ALL[index];
        let name = header.name().as_bytes();
        let slot = slot(name.len(), name[0], name[name.len() - 1]);
        assert!(slots[slot].is_none(), "two names share a slot: choose other factors");
        slots[slot] = Some(header);
        index += 1;
    }
    slots
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_in_any_case() {
        for &header in KnownHeader::ALL {
            let name = header.name();
            assert_eq!(KnownHeader::from_name(name.as_bytes()), Some(header));
            assert_eq!(KnownHeader::from_name(name.to_lowercase().as_bytes()), Some(header));
            assert_eq!(KnownHeader::from_name(name.to_uppercase().as_bytes()), Some(header));
        }
    }

    #[test]
    fn other_names_are_not_found() {
        for name in
            ["", "X", "Hosts", "Hist", "Content_Length", "X-Real-Ip2", "\u{212a}eep-Alive", "Keep\rAlive", "\u{8}ost"]
        {
            assert_eq!(KnownHeader::from_name(name.as_bytes()), None, "{name}");
        }
    }
}
