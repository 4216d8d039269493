//! Routing of a request: origin of its URI, relation of that to the location, and the method that counts.

/// Origin of a request's URI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum UriOrigin {
    /// The client has sent no path: its target is an authority, or its head is broken.
    #[default]
    None,
    /// The client has sent the URI.
    Client,
    /// The client has sent the URI, and the request was redirected to a named location.
    ClientRedirected,
    /// The configuration or a module has: by a rewrite, a redirect or a subrequest.
    Internal,
}

impl UriOrigin {
    /// True unless the URI led a client to the location: `internal` lets these requests in.
    pub fn is_internal(self) -> bool {
        matches!(self, UriOrigin::ClientRedirected | UriOrigin::Internal)
    }

    /// True if the URI is the one that the client has sent.
    pub fn is_client(self) -> bool {
        matches!(self, UriOrigin::Client | UriOrigin::ClientRedirected)
    }

    /// Returns the origin after a redirect to a named location, which leaves the URI as it is.
    pub fn redirected(self) -> UriOrigin {
        if self.is_client() { UriOrigin::ClientRedirected } else { UriOrigin::Internal }
    }
}

/// Relation between a request's URI and the location that it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum UriFit {
    /// The location was found by the URI.
    #[default]
    Found,
    /// The URI was rewritten: another location is searched when the phase of rewrites ends.
    Rewritten,
    /// The URI was rewritten and the request stays: settings that replace the location's part of the URI do not apply.
    Stays,
}

impl UriFit {
    /// Keeps the request in its location although its URI was rewritten.
    pub fn stay(&mut self) {
        if *self == UriFit::Rewritten {
            *self = UriFit::Stays;
        }
    }

    /// Drops the search for another location, since one is given.
    pub fn end_search(&mut self) {
        if *self == UriFit::Rewritten {
            *self = UriFit::Found;
        }
    }
}

/// Method that a request counts as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum CountedMethod {
    /// The method that the client has sent.
    #[default]
    Sent,
    /// GET, while `$request_method` shows the method of the client's request.
    Get,
    /// GET, also in `$request_method`: the client's request counts as one.
    ShownGet,
}

impl CountedMethod {
    /// Returns the method of a request that becomes a GET; `shows` if it is the client's.
    pub fn become_get(self, shows: bool) -> CountedMethod {
        if shows || self == CountedMethod::ShownGet { CountedMethod::ShownGet } else { CountedMethod::Get }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_to_a_named_location_is_internal_and_keeps_the_uri_as_sent() {
        let rows = [
            (UriOrigin::None, UriOrigin::Internal),
            (UriOrigin::Client, UriOrigin::ClientRedirected),
            (UriOrigin::ClientRedirected, UriOrigin::ClientRedirected),
            (UriOrigin::Internal, UriOrigin::Internal),
        ];
        for (before, after) in rows {
            assert_eq!(before.redirected(), after);
            assert!(after.is_internal());
            assert_eq!(after.is_client(), before.is_client());
        }
    }

    #[test]
    fn only_a_rewritten_uri_can_stay() {
        for (before, after) in
            [(UriFit::Found, UriFit::Found), (UriFit::Rewritten, UriFit::Stays), (UriFit::Stays, UriFit::Stays)]
        {
            let mut fit = before;
            fit.stay();
            assert_eq!(fit, after);
        }
    }
}
