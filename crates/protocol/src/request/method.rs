//! Request methods: those that nginx knows by name; all others keep only their text.

/// A request method. The text of any method, known or not, is returned by [`crate::request::RequestHead::method_name`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[allow(missing_docs)] // the names say it
pub enum Method {
    #[default]
    Get,
    Head,
    Post,
    Put,
    Delete,
    Options,
    Connect,
    Trace,
    Patch,
    Mkcol,
    Copy,
    Move,
    Lock,
    Unlock,
    Propfind,
    Proppatch,
    /// Any other token of capitals, "-" and "_".
    Other,
}

impl Method {
    /// Returns the method with exactly that name (methods are case-sensitive: RFC 9110 §9.1).
    pub fn from_name(name: &[u8]) -> Self {
        match name {
            b"GET" => Self::Get,
            b"HEAD" => Self::Head,
            b"POST" => Self::Post,
            b"PUT" => Self::Put,
            b"DELETE" => Self::Delete,
            b"OPTIONS" => Self::Options,
            b"CONNECT" => Self::Connect,
            b"TRACE" => Self::Trace,
            b"PATCH" => Self::Patch,
            b"MKCOL" => Self::Mkcol,
            b"COPY" => Self::Copy,
            b"MOVE" => Self::Move,
            b"LOCK" => Self::Lock,
            b"UNLOCK" => Self::Unlock,
            b"PROPFIND" => Self::Propfind,
            b"PROPPATCH" => Self::Proppatch,
            _ => Self::Other,
        }
    }
}
