//! Which of nginx's rules and RFC 9111's count, point by point: `proxy_cache_conformance`.

/// What a location says about conformance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conformance {
    /// The RFC wherever that cannot break a site that works with nginx.
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
    /// `Cache-Control` in responses is a list of directives; nginx looks for words anywhere in it. (RFC 9111 §5.2)
    pub parses_directives: bool,
    /// Cached responses tell their `Age`. (RFC 9111 §5.1)
    pub tells_age: bool,
    /// The age that a response has when it comes shortens its life here. (§4.2.3)
    pub counts_age: bool,
    /// So does what `Date` tells of its age: a server whose clock is behind has nothing stored then. (§4.2.3)
    pub counts_date: bool,
    /// `Expires` counts from the response's own `Date`. (§4.2.1)
    pub expires_from_date: bool,
    /// `no-cache`, and `no-cache` and `private` with field names, allow to store. (§5.2.2.4, §5.2.2.7)
    pub stores_no_cache: bool,
    /// Responses to requests with `Authorization` are stored only if they say that they may be. (§3.5)
    pub protects_authorization: bool,
    /// `must-revalidate`, `proxy-revalidate` and `s-maxage` forbid stale use whatever the location says. (§4.2.4)
    pub obeys_must_revalidate: bool,
    /// `stale-if-error` is for responses with an error status, too, as RFC 5861 says.
    pub stale_if_error_status: bool,
    /// Clients decide with `Cache-Control` in requests. (§5.2.1)
    pub obeys_requests: bool,
    /// Requests that change something take what is stored under their URI away. (§4.4)
    pub invalidates: bool,
    /// A 304 changes the stored fields. (§3.2)
    pub updates_fields: bool,
    /// A response to HEAD changes what is stored of GET, or makes it stale. (§4.3.5)
    pub heads_update: bool,
    /// `CDN-Cache-Control` counts before `Cache-Control`. (RFC 9213)
    pub obeys_cdn_cache_control: bool,
    /// `must-understand` counts. (§5.2.2.3)
    pub obeys_must_understand: bool,
    /// A part (206) is stored only where the key has its range: it never answers for the whole. (§3.3)
    pub refuses_parts: bool,
    /// Cookies do not keep a response from being stored. (§7.3)
    pub stores_cookies: bool,
    /// Conditions of clients are judged in the RFC's order. (§4.3.2; RFC 9110 §13.2.2)
    pub rfc_conditions: bool,
    /// Parts are cut of a whole stored response although its server did not offer parts. (§3.4; RFC 9110 §14.2)
    pub cuts_parts_always: bool,
    /// A stored response is sent with the `Date` that it came with. (§3.1; RFC 9110 §6.6.1)
    pub keeps_date: bool,
    /// A response to POST is stored for GET if it names its own URI and says for how long it is fresh.
    /// (RFC 9110 §9.3.3)
    pub stores_posts: bool,
}

impl Conformance {
    /// What this comes to.
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
