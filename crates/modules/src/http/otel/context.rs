//! Trace context of a request: from the client, and to the servers that the request is passed to. (W3C Trace Context:
//! <https://www.w3.org/TR/trace-context/>)
//!
//! Fields that do not have the standard's form are ignored, and so are repeated `traceparent` fields.

use std::cell::OnceCell;
use std::io;

use gale_http::request::Request;
use gale_runtime::secret_u64;

use crate::shared::append::append_hex;

const TRACEPARENT: &[u8] = b"traceparent";
const TRACESTATE: &[u8] = b"tracestate";

/// `00-` trace `-` span `-` flags.
const TRACEPARENT_BYTES: usize = 55;

/// Flag of a sender that records the trace (section 3.2.2.5.1).
const SAMPLED: u8 = 1;

/// Maximum number of members of a `tracestate` (section 3.3.1.1), and maximum lengths of a key and of a value.
const MEMBERS_MAX: usize = 32;
const MEMBER_PART_MAX: usize = 256;

pub(super) type TraceId = [u8; 16];
pub(super) type SpanId = [u8; 8];

/// Span of a request's sender.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parent {
    trace_id: TraceId,
    pub span_id: SpanId,
    pub is_sampled: bool,
    /// State of other vendors; may be empty.
    pub state: Vec<u8>,
}

/// Span of a request.
pub(super) struct TraceContext {
    pub trace_id: TraceId,
    pub span_id: SpanId,
    pub parent: Option<Parent>,
}

/// State that a request and its subrequests share.
#[derive(Default)]
pub(super) struct Note {
    context: OnceCell<TraceContext>,
}

impl Note {
    /// Returns the request's trace context, created at the first call; `extracts` returns whether the client's fields
    /// are used.
    pub fn context(&self, request: &Request, extracts: impl FnOnce() -> bool) -> &TraceContext {
        self.context.get_or_init(|| TraceContext::begin(request, extracts()))
    }
}

impl TraceContext {
    fn begin(request: &Request, extracts: bool) -> TraceContext {
        let parent = extracts.then(|| Parent::of(request)).flatten();
        let (high, low, span) = request.worker().common.with_note(|ids: &mut Ids| (ids.next(), ids.next(), ids.next()));
        let trace_id = parent
            .as_ref()
            .map_or_else(|| (u128::from(high) << 64 | u128::from(low)).to_be_bytes(), |parent| parent.trace_id);
        TraceContext { trace_id, span_id: span.to_be_bytes(), parent }
    }

    /// Adds the context to the request that servers get.
    ///
    /// # Errors
    /// The worker's memory bound is reached.
    pub fn inject(&self, request: &mut Request, is_sampled: bool) -> io::Result<()> {
        request.set_field(TRACEPARENT, &self.traceparent(is_sampled))?;
        request.set_field(TRACESTATE, self.parent.as_ref().map_or(b"", |parent| &parent.state))
    }

    fn traceparent(&self, is_sampled: bool) -> Vec<u8> {
        let mut text = Vec::with_capacity(TRACEPARENT_BYTES);
        text.extend_from_slice(b"00-");
        append_hex(&mut text, &self.trace_id);
        text.push(b'-');
        append_hex(&mut text, &self.span_id);
        text.extend_from_slice(if is_sampled { b"-01" } else { b"-00" });
        text
    }
}

impl Parent {
    fn of(request: &Request) -> Option<Parent> {
        let values = |name: &'static [u8]| {
            request.fields().filter(move |(_, own, _)| own.eq_ignore_ascii_case(name)).map(|(_, _, value)| value)
        };
        let mut parents = values(TRACEPARENT);
        let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
        let (trace_id, span_id, is_sampled) = parse_traceparent(parent)?;
        // Several fields make one list (section 3.3.1.1).
        let state: Vec<u8> = values(TRACESTATE).collect::<Vec<_>>().join(&b","[..]);
        let state = if is_tracestate(&state) { state } else { Vec::new() };
        Some(Parent { trace_id, span_id, is_sampled, state })
    }
}

/// Parses a `traceparent` (section 3.2); of a later version, the fields of the first one.
fn parse_traceparent(text: &[u8]) -> Option<(TraceId, SpanId, bool)> {
    let (head, rest) = text.split_at_checked(TRACEPARENT_BYTES)?;
    let [version] = hex(&head[..2])?;
    let is_whole = match version {
        0 => rest.is_empty(),
        0xff => false,
        _ => rest.first().is_none_or(|&next| next == b'-'),
    };
    if !is_whole || [2, 35, 52].iter().any(|&place| head[place] != b'-') {
        return None;
    }
    let (trace_id, span_id, [flags]) = (hex(&head[3..35])?, hex(&head[36..52])?, hex(&head[53..])?);
    let is_there = trace_id != TraceId::default() && span_id != SpanId::default();
    is_there.then_some((trace_id, span_id, flags & SAMPLED != 0))
}

/// Parses lower-case hexadecimal digits; upper case is invalid (section 3.2.2).
fn hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

/// Returns `true` if a list of members has the standard's form (section 3.3.1.3).
fn is_tracestate(text: &[u8]) -> bool {
    let members = text.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|member| !member.is_empty());
    let mut count = 0;
    members.into_iter().all(|member| {
        count += 1;
        count <= MEMBERS_MAX && is_member(member)
    })
}

fn is_member(member: &[u8]) -> bool {
    let Some(place) = member.iter().position(|&byte| byte == b'=') else { return false };
    let (key, value) = (&member[..place], &member[place + 1..]);
    let is_start = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_in_key = |byte: &u8| is_start(byte) || matches!(byte, b'_' | b'-' | b'*' | b'/' | b'@');
    let is_in_value = |byte: &u8| matches!(byte, b' '..=b'~') && *byte != b'=';
    key.first().is_some_and(is_start)
        && key.iter().all(is_in_key)
        && !value.is_empty()
        && value.iter().all(is_in_value)
        && key.len().max(value.len()) <= MEMBER_PART_MAX
}

/// Generator of ids for one event loop. No id is zero, and ids do not reveal each other. (SplitMix64 with a step of its
/// own: no two loops go through the same numbers.)
struct Ids {
    state: u64,
    step: u64,
}

impl Default for Ids {
    fn default() -> Ids {
        Ids { state: secret_u64(), step: secret_u64() | 1 }
    }
}

impl Ids {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(self.step);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    fn parse(text: &str) -> Option<bool> {
        let (trace, span, is_sampled) = parse_traceparent(text.as_bytes())?;
        let mut shown = Vec::new();
        append_hex(&mut shown, &trace);
        append_hex(&mut shown, &span);
        assert_eq!(shown, format!("{TRACE}{SPAN}").into_bytes());
        Some(is_sampled)
    }

    #[test]
    fn a_traceparent_is_read_in_the_standard_s_form_only() {
        assert_eq!(parse(&format!("00-{TRACE}-{SPAN}-01")), Some(true));
        assert_eq!(parse(&format!("00-{TRACE}-{SPAN}-02")), Some(false));
        assert_eq!(parse(&format!("cc-{TRACE}-{SPAN}-ff")), Some(true));
        assert_eq!(parse(&format!("cc-{TRACE}-{SPAN}-01-what-comes")), Some(true));
        for wrong in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-{SPAN}-0"),
            format!("00-{TRACE}-{SPAN}-01-"),
            format!("00-{TRACE}-{SPAN}-011"),
            format!("cc-{TRACE}-{SPAN}-01.x"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("0x-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}-{}-01", "g".repeat(16)),
            format!("00_{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-0\u{e9}"),
            "-".repeat(55),
            "\u{0}".repeat(55),
        ] {
            assert_eq!(parse_traceparent(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn a_tracestate_is_a_short_list_of_members() {
        let members = |count: usize| (0..count).map(|number| format!("k{number}=v")).collect::<Vec<_>>().join(",");
        let long = "x".repeat(256);
        for right in ["", "a=b", "congo=ucfJifl5GOE,rojo=00f0", " a=1 ,\tb@c=2 , ,", "0a/b*_-=x y"] {
            assert!(is_tracestate(right.as_bytes()), "{right}");
        }
        assert!(is_tracestate(members(32).as_bytes()) && !is_tracestate(members(33).as_bytes()));
        assert!(is_tracestate(format!("{long}={long}").as_bytes()));
        for wrong in ["a", "=b", "A=b", "a=", "a=b=c", "a b=c", "a=\u{e9}", "a=\r", "-a=b"] {
            assert!(!is_tracestate(wrong.as_bytes()), "{wrong}");
        }
        assert!(!is_tracestate(format!("{long}x=a").as_bytes()) && !is_tracestate(format!("a={long}x").as_bytes()));
    }

    #[test]
    fn no_two_loops_make_the_same_ids() {
        let (mut one, mut other) =
            (Ids { state: 1, step: 0x1234_5678_9abc_def1 }, Ids { state: 1, step: 0xfed_cba9_8765_4321 });
        let ids: std::collections::HashSet<u64> = (0..1000).flat_map(|_| [one.next(), other.next()]).collect();
        assert_eq!(ids.len(), 2000);
    }

    #[test]
    fn written_context_is_read_back() {
        let context = TraceContext { trace_id: [7; 16], span_id: [9; 8], parent: None };
        assert_eq!(parse_traceparent(&context.traceparent(true)), Some(([7; 16], [9; 8], true)));
        assert_eq!(parse_traceparent(&context.traceparent(false)), Some(([7; 16], [9; 8], false)));
    }
}
