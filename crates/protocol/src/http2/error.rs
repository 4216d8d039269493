//! HTTP/2 faults of a peer: each has a name, a section of an RFC and an error code.
//!
//! A connection fault ends the connection with GOAWAY, a stream fault ends only that stream with RST_STREAM (RFC 9113
//! §5.4). They have different types, so that they cannot be confused.

use std::fmt;

use super::hpack::HpackFault;

/// An error code: RFC 9113 §7.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ErrorCode(pub u32);

#[allow(missing_docs)] // the names are those of RFC 9113 §7
impl ErrorCode {
    pub const NO_ERROR: Self = Self(0);
    pub const PROTOCOL_ERROR: Self = Self(1);
    pub const INTERNAL_ERROR: Self = Self(2);
    pub const FLOW_CONTROL_ERROR: Self = Self(3);
    pub const SETTINGS_TIMEOUT: Self = Self(4);
    pub const STREAM_CLOSED: Self = Self(5);
    pub const FRAME_SIZE_ERROR: Self = Self(6);
    pub const REFUSED_STREAM: Self = Self(7);
    pub const CANCEL: Self = Self(8);
    pub const COMPRESSION_ERROR: Self = Self(9);
    pub const CONNECT_ERROR: Self = Self(10);
    pub const ENHANCE_YOUR_CALM: Self = Self(11);
    pub const INADEQUATE_SECURITY: Self = Self(12);
    pub const HTTP_1_1_REQUIRED: Self = Self(13);
}

impl ErrorCode {
    /// Returns the name in RFC 9113 §7. A code without a name counts as INTERNAL_ERROR (§7), but keeps its number.
    pub fn name(self) -> Option<&'static str> {
        const NAMES: [&str; 14] = [
            "NO_ERROR",
            "PROTOCOL_ERROR",
            "INTERNAL_ERROR",
            "FLOW_CONTROL_ERROR",
            "SETTINGS_TIMEOUT",
            "STREAM_CLOSED",
            "FRAME_SIZE_ERROR",
            "REFUSED_STREAM",
            "CANCEL",
            "COMPRESSION_ERROR",
            "CONNECT_ERROR",
            "ENHANCE_YOUR_CALM",
            "INADEQUATE_SECURITY",
            "HTTP_1_1_REQUIRED",
        ];
        NAMES.get(self.0 as usize).copied()
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "error {:#x}", self.0),
        }
    }
}

/// Defines an enum of faults, each with error code, RFC section and message.
macro_rules! faults {
    (
        $(#[$attribute:meta])* $type:ident:
        $($(#[$doc:meta])* $variant:ident $code:ident $section:literal $text:literal),+ $(,)?
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum $type {
            $(#[doc = concat!($text, ": ", $section, ".")] $(#[$doc])* $variant,)+
        }

        impl $type {
            /// Error code sent to the peer.
            pub const fn code(self) -> ErrorCode {
                match self {
                    $(Self::$variant => ErrorCode::$code,)+
                }
            }

            /// Section of the violated rule.
            pub const fn section(self) -> &'static str {
                match self {
                    $(Self::$variant => $section,)+
                }
            }

            /// Log message, to follow "client sent" or "upstream sent".
            pub const fn message(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.message())
            }
        }

        impl std::error::Error for $type {}
    };
}

faults! {
    /// A frame that is malformed or out of order and ends the connection.
    FrameFault:
    InvalidPreface PROTOCOL_ERROR "RFC 9113 §3.4" "invalid connection preface",
    SettingsExpected PROTOCOL_ERROR "RFC 9113 §3.4" "another frame than SETTINGS at first",
    FrameTooLong FRAME_SIZE_ERROR "RFC 9113 §4.2" "frame longer than the maximum",
    StreamIdExpected PROTOCOL_ERROR "RFC 9113 §5.1.1" "frame with incorrect identifier: stream 0",
    StreamIdUnexpected PROTOCOL_ERROR "RFC 9113 §5.1.1" "frame with incorrect identifier: a stream's",
    PaddingTooLong PROTOCOL_ERROR "RFC 9113 §6.1" "padded frame with incorrect length",
    IncorrectLength FRAME_SIZE_ERROR "RFC 9113 §4.2" "frame with incorrect length",
    ContinuationExpected PROTOCOL_ERROR "RFC 9113 §6.10" "inappropriate frame while CONTINUATION was expected",
    ContinuationUnexpected PROTOCOL_ERROR "RFC 9113 §6.10" "unexpected CONTINUATION frame",
    SettingsAckWithPayload FRAME_SIZE_ERROR "RFC 9113 §6.5" "SETTINGS frame with the ACK flag and nonzero length",
    PushPromise PROTOCOL_ERROR "RFC 9113 §8.4" "PUSH_PROMISE frame",
    WindowIncrementZero PROTOCOL_ERROR "RFC 9113 §6.9" "WINDOW_UPDATE frame with incorrect window increment 0",
    InvalidPriorityUpdate PROTOCOL_ERROR "RFC 9218 §7.1" "invalid PRIORITY_UPDATE frame",
}

faults! {
    /// A violation that ends one stream. `Display` gives the log message without "client sent".
    StreamFault:
    PriorityLength FRAME_SIZE_ERROR "RFC 9113 §6.3" "PRIORITY frame with incorrect length",
    SelfDependency PROTOCOL_ERROR "RFC 7540 §5.3.1" "stream with incorrect dependency on itself",
    StreamIncrementZero PROTOCOL_ERROR "RFC 9113 §6.9" "WINDOW_UPDATE frame with incorrect window increment 0",
    StreamWindowOverflow FLOW_CONTROL_ERROR "RFC 9113 §6.9.1" "WINDOW_UPDATE frame with too large window increment",
    StreamWindowExceeded FLOW_CONTROL_ERROR "RFC 9113 §6.9.1" "more data than the stream's window",
    StreamClosed STREAM_CLOSED "RFC 9113 §5.1" "frame for a half-closed stream",
    TooManyStreams REFUSED_STREAM "RFC 9113 §5.1.2" "too many streams at once",
    InvalidFieldName PROTOCOL_ERROR "RFC 9113 §8.2.1" "invalid header name",
    InvalidFieldValue PROTOCOL_ERROR "RFC 9113 §8.2.1" "header with invalid value",
    ConnectionSpecificField PROTOCOL_ERROR "RFC 9113 §8.2.2" "connection-specific header",
    InvalidTe PROTOCOL_ERROR "RFC 9113 §8.2.2" "invalid \"TE\" header",
    UnknownPseudoHeader PROTOCOL_ERROR "RFC 9113 §8.3" "unknown pseudo-header",
    PseudoHeaderBehindField PROTOCOL_ERROR "RFC 9113 §8.3" "out of order pseudo-headers",
    PseudoHeaderInTrailers PROTOCOL_ERROR "RFC 9113 §8.1" "pseudo-header in trailers",
    DuplicatePseudoHeader PROTOCOL_ERROR "RFC 9113 §8.3" "duplicate pseudo-header",
    MissingMethod PROTOCOL_ERROR "RFC 9113 §8.3.1" "no :method header",
    MissingScheme PROTOCOL_ERROR "RFC 9113 §8.3.1" "no :scheme header",
    MissingPath PROTOCOL_ERROR "RFC 9113 §8.3.1" "no :path header",
    EmptyPath PROTOCOL_ERROR "RFC 9113 §8.3.1" "empty :path header",
    InvalidScheme PROTOCOL_ERROR "RFC 9113 §8.3.1" "invalid :scheme header",
    InvalidConnect PROTOCOL_ERROR "RFC 9113 §8.5" "CONNECT with incorrect pseudo-headers",
    UnexpectedProtocol PROTOCOL_ERROR "RFC 8441 §4" "unexpected :protocol header",
    InvalidStatus PROTOCOL_ERROR "RFC 9113 §8.3.2" "invalid :status header",
    InvalidContentLength PROTOCOL_ERROR "RFC 9113 §8.1.1" "invalid \"Content-Length\" header",
    ContentLengthMismatch PROTOCOL_ERROR "RFC 9113 §8.1.1" "data that contradicts \"Content-Length\"",
    TrailersWithoutEnd PROTOCOL_ERROR "RFC 9113 §8.1" "header block in the middle of a message",
    InterimEndsStream PROTOCOL_ERROR "RFC 9113 §8.1" "interim response that ends the stream",
    DataBeforeHead PROTOCOL_ERROR "RFC 9113 §8.1" "DATA frame before the response's head",
    TooBigTrailers ENHANCE_YOUR_CALM "RFC 9113 §10.5.1" "too large trailers",
    TooBigResponseHead ENHANCE_YOUR_CALM "RFC 9113 §10.5.1" "too big header",
}

/// Excessive behaviour that suggests an attack: RFC 9113 §10.5.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flood {
    /// Streams reset by the peer, or by us for a fault of the peer.
    Resets,
    /// PING frames.
    Pings,
    /// SETTINGS frames.
    Settings,
    /// DATA without data, CONTINUATION without a fragment.
    EmptyFrames,
    /// WINDOW_UPDATE frames in excess of the DATA frames that we send.
    WindowUpdates,
    /// PRIORITY and PRIORITY_UPDATE frames.
    Priorities,
    /// Frames of unknown types.
    UnknownFrames,
    /// Requests above the stream limit.
    RefusedStreams,
    /// Frames that require a response, from a peer that does not read the responses.
    Unread,
}

impl Flood {
    const fn message(self) -> &'static str {
        match self {
            Self::Resets => "too many reset streams",
            Self::Pings => "too many PING frames",
            Self::Settings => "too many SETTINGS frames",
            Self::EmptyFrames => "too many empty frames",
            Self::WindowUpdates => "too many WINDOW_UPDATE frames",
            Self::Priorities => "too many PRIORITY frames",
            Self::UnknownFrames => "too many frames of unknown types",
            Self::RefusedStreams => "too many refused streams",
            Self::Unread => "too many frames without reading the answers",
        }
    }
}

/// A violation that ends the connection. `Display` gives the log message without "client sent".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConnectionFault {
    /// A frame that is malformed or out of order.
    Frame(FrameFault),
    /// A frame that the state of the connection does not allow.
    State(StateFault),
    /// A field block that cannot be decoded: RFC 9113 §4.3.
    Compression(HpackFault),
    /// Excessive behaviour.
    Flood(Flood),
}

faults! {
    /// A frame that the state of the connection or of a stream does not allow.
    StateFault:
    InvalidStreamId PROTOCOL_ERROR "RFC 9113 §5.1.1" "HEADERS frame with incorrect identifier",
    IdleStream PROTOCOL_ERROR "RFC 9113 §5.1" "frame for an idle stream",
    ClosedStream STREAM_CLOSED "RFC 9113 §5.1" "frame for a closed stream",
    WindowOverflow FLOW_CONTROL_ERROR "RFC 9113 §6.9.1" "WINDOW_UPDATE frame with too large window increment",
    InitialWindowOverflow FLOW_CONTROL_ERROR "RFC 9113 §6.9.2" "SETTINGS frame that overflows a stream's window",
    WindowExceeded FLOW_CONTROL_ERROR "RFC 9113 §6.9.1" "more data than the connection's window",
    InvalidEnablePush PROTOCOL_ERROR "RFC 9113 §6.5.2" "SETTINGS frame with incorrect ENABLE_PUSH value",
    InvalidInitialWindow FLOW_CONTROL_ERROR "RFC 9113 §6.5.2" "SETTINGS frame with incorrect INITIAL_WINDOW_SIZE value",
    InvalidMaxFrameSize PROTOCOL_ERROR "RFC 9113 §6.5.2" "SETTINGS frame with incorrect MAX_FRAME_SIZE value",
    InvalidEnableConnect PROTOCOL_ERROR "RFC 8441 §3" "SETTINGS frame with incorrect ENABLE_CONNECT_PROTOCOL value",
    InvalidNoPriorities PROTOCOL_ERROR "RFC 9218 §2.1" "SETTINGS frame with incorrect NO_RFC7540_PRIORITIES value",
    SelfDependency PROTOCOL_ERROR "RFC 7540 §5.3.1" "PRIORITY frame with incorrect dependency on its own stream",
    GoAwayIdIncreased PROTOCOL_ERROR "RFC 9113 §6.8" "GOAWAY frame with a larger identifier than before",
    TooManyContinuations ENHANCE_YOUR_CALM "RFC 9113 §10.5.1" "too many CONTINUATION frames",
    HeaderBlockTooLong ENHANCE_YOUR_CALM "RFC 9113 §10.5.1" "too large header block",
    HeaderListTooLong ENHANCE_YOUR_CALM "RFC 9113 §10.5.1" "too large header list",
}

impl ConnectionFault {
    /// Error code sent to the peer.
    pub fn code(self) -> ErrorCode {
        match self {
            Self::Frame(fault) => fault.code(),
            Self::State(fault) => fault.code(),
            Self::Compression(_) => ErrorCode::COMPRESSION_ERROR,
            Self::Flood(_) => ErrorCode::ENHANCE_YOUR_CALM,
        }
    }

    /// Section of the violated rule.
    pub fn section(self) -> &'static str {
        match self {
            Self::Frame(fault) => fault.section(),
            Self::State(fault) => fault.section(),
            Self::Compression(_) => "RFC 9113 §4.3",
            Self::Flood(_) => "RFC 9113 §10.5",
        }
    }
}

impl fmt::Display for ConnectionFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame(fault) => fault.fmt(f),
            Self::State(fault) => fault.fmt(f),
            Self::Compression(fault) => fault.fmt(f),
            Self::Flood(flood) => f.write_str(flood.message()),
        }
    }
}

impl std::error::Error for ConnectionFault {}

impl From<FrameFault> for ConnectionFault {
    fn from(fault: FrameFault) -> Self {
        Self::Frame(fault)
    }
}

impl From<StateFault> for ConnectionFault {
    fn from(fault: StateFault) -> Self {
        Self::State(fault)
    }
}

impl From<HpackFault> for ConnectionFault {
    fn from(fault: HpackFault) -> Self {
        Self::Compression(fault)
    }
}

impl From<Flood> for ConnectionFault {
    fn from(flood: Flood) -> Self {
        Self::Flood(flood)
    }
}
