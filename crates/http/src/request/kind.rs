//! Kind of a request: the client's own, a part of one, or one in the background.

/// Maximum depth of nested subrequests, as in nginx.
const NESTED_MAX: u8 = 50;

/// See the file's head. The depth is the number of subrequests between the request and the client's, itself included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Kind {
    /// The client's request.
    #[default]
    Main,
    /// Part of a client's request, which lasts longer.
    Subrequest { depth: u8 },
    /// Copy of a client's request, or part of a copy: the client's request may be over.
    Background { depth: u8 },
}

impl Kind {
    /// Background request whose client's request is over.
    pub const LEFT_BEHIND: Kind = Kind::Background { depth: 1 };

    /// Returns the kind of a subrequest of this request.
    pub fn of_subrequest(self) -> Kind {
        match self {
            Kind::Main => Kind::Subrequest { depth: 1 },
            Kind::Subrequest { depth } => Kind::Subrequest { depth: depth + 1 },
            Kind::Background { depth } => Kind::Background { depth: depth + 1 },
        }
    }

    /// Returns the kind of this subrequest once the client's request does not wait for it any more.
    pub fn in_background(self) -> Kind {
        Kind::Background { depth: self.depth() }
    }

    /// True for a request that may outlast the client's.
    pub fn is_background(self) -> bool {
        matches!(self, Kind::Background { .. })
    }

    /// True if a subrequest of this request would be nested too deep.
    pub fn is_nested_too_deep(self) -> bool {
        self.depth() > NESTED_MAX
    }

    fn depth(self) -> u8 {
        match self {
            Kind::Main => 0,
            Kind::Subrequest { depth } | Kind::Background { depth } => depth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subrequest_of_a_background_request_is_in_the_background_too() {
        let part = Kind::Main.of_subrequest();
        assert_eq!(part, Kind::Subrequest { depth: 1 });
        assert_eq!(part.in_background().of_subrequest(), Kind::Background { depth: 2 });
    }

    #[test]
    fn nesting_has_a_bound_whatever_the_kind() {
        let mut kinds = [Kind::Main, Kind::LEFT_BEHIND];
        for kind in &mut kinds {
            while !kind.is_nested_too_deep() {
                *kind = kind.of_subrequest();
            }
            assert_eq!(kind.depth(), NESTED_MAX + 1);
        }
    }
}
