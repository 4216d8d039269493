//! Known header fields of requests, identified by number instead of by name.

use crate::known_field::known_fields;

known_fields! {
    /// A known header field of a request.
    KnownHeader:
    Accept "Accept",
    AcceptCharset "Accept-Charset",
    AcceptEncoding "Accept-Encoding",
    AcceptLanguage "Accept-Language",
    Authorization "Authorization",
    CacheControl "Cache-Control",
    Connection "Connection",
    ContentEncoding "Content-Encoding",
    ContentLength "Content-Length",
    ContentRange "Content-Range",
    ContentType "Content-Type",
    Cookie "Cookie",
    Date "Date",
    Depth "Depth",
    Destination "Destination",
    EarlyData "Early-Data",
    Expect "Expect",
    Forwarded "Forwarded",
    Host "Host",
    Http2Settings "HTTP2-Settings",
    IfMatch "If-Match",
    IfModifiedSince "If-Modified-Since",
    IfNoneMatch "If-None-Match",
    IfRange "If-Range",
    IfUnmodifiedSince "If-Unmodified-Since",
    KeepAlive "Keep-Alive",
    Origin "Origin",
    Overwrite "Overwrite",
    Pragma "Pragma",
    ProxyAuthorization "Proxy-Authorization",
    ProxyConnection "Proxy-Connection",
    Range "Range",
    Referer "Referer",
    Te "TE",
    Trailer "Trailer",
    TransferEncoding "Transfer-Encoding",
    Upgrade "Upgrade",
    UpgradeInsecureRequests "Upgrade-Insecure-Requests",
    UserAgent "User-Agent",
    Via "Via",
    XForwardedFor "X-Forwarded-For",
    XForwardedHost "X-Forwarded-Host",
    XForwardedProto "X-Forwarded-Proto",
    XRealIp "X-Real-IP",
    XRequestedWith "X-Requested-With",
}

/// Fields that must not be repeated, as in nginx, since programs may interpret a repetition differently. A second Host
/// is checked separately, because it has its own offence.
const UNIQUE: KnownHeaders = KnownHeaders::of(&[
    KnownHeader::Authorization,
    KnownHeader::ContentLength,
    KnownHeader::ContentRange,
    KnownHeader::Expect,
    KnownHeader::IfMatch,
    KnownHeader::IfModifiedSince,
    KnownHeader::IfNoneMatch,
    KnownHeader::IfRange,
    KnownHeader::IfUnmodifiedSince,
    KnownHeader::ProxyAuthorization,
    KnownHeader::TransferEncoding,
]);

impl KnownHeader {
    /// Returns `true` if a second line with this name is an offence.
    pub(crate) const fn is_unique(self) -> bool {
        UNIQUE.0 >> self as u8 & 1 == 1
    }
}

/// A set of known fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownHeaders(u64);

impl KnownHeaders {
    /// Creates a set of these fields.
    pub const fn of(headers: &[KnownHeader]) -> Self {
        let (mut set, mut index) = (0, 0);
        while index < headers.len() {
            set |= 1 << headers[index] as u8;
            index += 1;
        }
        KnownHeaders(set)
    }

    /// Returns `true` if one of the fields is in `present`, a bit set of fields.
    pub(super) fn has_any_of(self, present: u64) -> bool {
        self.0 & present != 0
    }
}

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
