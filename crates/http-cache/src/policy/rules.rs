//! The choice between nginx's rules and those of RFC 9111, point by point: `proxy_cache_conformance`.

/// Value of `proxy_cache_conformance`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conformance {
    /// The RFC's rules, except where they could break a site that works with nginx.
    #[default]
    Mixed,
    /// nginx's rules throughout.
    Nginx,
    /// The RFC's rules throughout.
    Rfc9111,
}

/// One field per point in which nginx and the RFC differ; `true` is the RFC's rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// `Cache-Control` in responses is parsed as a list of directives; nginx searches for words anywhere in it. (RFC
    /// 9111 §5.2)
    pub parses_directives: bool,
    /// Cached responses have an `Age`. (RFC 9111 §5.1)
    pub tells_age: bool,
    /// The `Age` of a received response shortens its lifetime. (§4.2.3)
    pub counts_age: bool,
    /// So does the age by its `Date`: with this rule, a response of a server whose clock is behind may not be stored.
    /// (§4.2.3)
    pub counts_date: bool,
    /// `Expires` is relative to the response's own `Date`. (§4.2.1)
    pub expires_from_date: bool,
    /// `no-cache`, and `no-cache` and `private` with field names, permit storing. (§5.2.2.4, §5.2.2.7)
    pub stores_no_cache: bool,
    /// Responses to requests with `Authorization` are stored only if they permit it. (§3.5)
    pub protects_authorization: bool,
    /// `must-revalidate`, `proxy-revalidate` and `s-maxage` forbid stale use, whatever the location allows. (§4.2.4)
    pub obeys_must_revalidate: bool,
    /// `stale-if-error` also covers responses with an error status, as in RFC 5861.
    pub stale_if_error_status: bool,
    /// `Cache-Control` in requests is obeyed. (§5.2.1)
    pub obeys_requests: bool,
    /// Unsafe requests invalidate the stored response of their URI. (§4.4)
    pub invalidates: bool,
    /// A 304 updates the stored fields. (§3.2)
    pub updates_fields: bool,
    /// A response to HEAD updates the stored response to GET, or makes it stale. (§4.3.5)
    pub heads_update: bool,
    /// `CDN-Cache-Control` takes precedence over `Cache-Control`. (RFC 9213)
    pub obeys_cdn_cache_control: bool,
    /// `must-understand` is obeyed. (§5.2.2.3)
    pub obeys_must_understand: bool,
    /// A part (206) is stored only if the key contains its range: it never answers for the whole. (§3.3)
    pub refuses_parts: bool,
    /// Responses with cookies are stored. (§7.3)
    pub stores_cookies: bool,
    /// Conditions of clients are evaluated in the RFC's order. (§4.3.2; RFC 9110 §13.2.2)
    pub rfc_conditions: bool,
    /// Ranges of a whole stored response are served even if its server did not announce support for ranges. (§3.4; RFC
    /// 9110 §14.2)
    pub cuts_parts_always: bool,
    /// A stored response is sent with its original `Date`. (§3.1; RFC 9110 §6.6.1)
    pub keeps_date: bool,
    /// A response to POST is stored for GET if it names its own URI and has an explicit lifetime. (RFC 9110 §9.3.3)
    pub stores_posts: bool,
}

impl Conformance {
    /// The rules of this choice.
    pub const fn rules(self) -> Rules {
        match self {
            Conformance::Nginx => Rules {
                parses_directives: false,
                tells_age: false,
                counts_age: false,
                counts_date: false,
                expires_from_date: false,
                stores_no_cache: false,
                protects_authorization: false,
                obeys_must_revalidate: false,
                stale_if_error_status: false,
                obeys_requests: false,
                invalidates: false,
                updates_fields: false,
                heads_update: false,
                obeys_cdn_cache_control: false,
                obeys_must_understand: false,
                refuses_parts: false,
                stores_cookies: false,
                rfc_conditions: false,
                cuts_parts_always: false,
                keeps_date: false,
                stores_posts: false,
            },
            Conformance::Mixed => Rules {
                parses_directives: true,
                tells_age: true,
                counts_age: true,
                expires_from_date: true,
                protects_authorization: true,
                invalidates: true,
                updates_fields: true,
                heads_update: true,
                obeys_cdn_cache_control: true,
                obeys_must_understand: true,
                refuses_parts: true,
                ..Conformance::Nginx.rules()
            },
            Conformance::Rfc9111 => Rules {
                counts_date: true,
                stores_no_cache: true,
                obeys_must_revalidate: true,
                stale_if_error_status: true,
                obeys_requests: true,
                stores_cookies: true,
                rfc_conditions: true,
                cuts_parts_always: true,
                keeps_date: true,
                stores_posts: true,
                ..Conformance::Mixed.rules()
            },
        }
    }
}
