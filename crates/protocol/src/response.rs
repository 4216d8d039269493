//! Known header fields of responses: those generated from the state of a response, used by filters, or evaluated by a
//! proxy.

use crate::known_field::known_fields;

known_fields! {
    /// A known header field of a response.
    ResponseField:
    AcceptRanges "Accept-Ranges",
    Age "Age",
    AltSvc "Alt-Svc",
    CacheControl "Cache-Control",
    Connection "Connection",
    ContentDisposition "Content-Disposition",
    ContentEncoding "Content-Encoding",
    ContentLength "Content-Length",
    ContentRange "Content-Range",
    ContentType "Content-Type",
    Date "Date",
    ETag "ETag",
    Expires "Expires",
    KeepAlive "Keep-Alive",
    LastModified "Last-Modified",
    Link "Link",
    Location "Location",
    P3p "P3P",
    Pragma "Pragma",
    ProxyAuthenticate "Proxy-Authenticate",
    ProxyAuthenticationInfo "Proxy-Authentication-Info",
    ProxyConnection "Proxy-Connection",
    Refresh "Refresh",
    RetryAfter "Retry-After",
    Server "Server",
    SetCookie "Set-Cookie",
    Status "Status",
    StrictTransportSecurity "Strict-Transport-Security",
    Te "TE",
    Trailer "Trailer",
    TransferEncoding "Transfer-Encoding",
    Upgrade "Upgrade",
    Vary "Vary",
    Via "Via",
    WwwAuthenticate "WWW-Authenticate",
    XAccelBuffering "X-Accel-Buffering",
    XAccelCharset "X-Accel-Charset",
    XAccelExpires "X-Accel-Expires",
    XAccelLimitRate "X-Accel-Limit-Rate",
    XAccelRedirect "X-Accel-Redirect",
}

impl ResponseField {
    /// Returns `true` for connection-specific and framing fields, which a proxy replaces with its own (RFC 9110
    /// §7.6.1). `Content-Length` is not one of them.
    pub fn is_of_connection(self) -> bool {
        matches!(
            self,
            ResponseField::Connection
                | ResponseField::KeepAlive
                | ResponseField::ProxyConnection
                | ResponseField::Te
                | ResponseField::Trailer
                | ResponseField::TransferEncoding
                | ResponseField::Upgrade
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_fields_are_found_by_name_in_any_case() {
        for &field in ResponseField::ALL {
            let name = field.name();
            for name in [name, &name.to_lowercase(), &name.to_uppercase()] {
                assert_eq!(ResponseField::from_name(name.as_bytes()), Some(field), "{name}");
            }
        }
        for name in ["", "X", "ETags", "Serves", "Content_Type", "X-Accel-Redirecs", "Set\rCookie"] {
            assert_eq!(ResponseField::from_name(name.as_bytes()), None, "{name}");
        }
    }
}
