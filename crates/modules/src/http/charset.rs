//! charset: the charset in `Content-Type`, and conversion of bodies from one charset to another.
//!   charset NAME | $VARIABLE | off;         http, server, location, if in location
//!   source_charset NAME | $VARIABLE;        http, server, location, if in location
//!   override_charset on | off;              http, server, location, if in location
//!   charset_types TYPE ...;                 http, server, location
//!   charset_map NAME NAME { CODE CODE; ... }                                     http
//! (<https://nginx.org/en/docs/http/ngx_http_charset_module.html>)
//!
//! Applies to responses of a listed type, and with `override_charset` to any response that names a charset. The output
//! of subrequests gets the charset of the client's request. Compressed bodies are never converted. A character that the
//! table lacks becomes `&#NUMBER;` if the source is UTF-8, else a question mark; invalid UTF-8 becomes a question mark,
//! too, and unlike in nginx the bytes behind it are not lost.

use std::any::Any;
use std::cell::RefCell;
use std::io::Write;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bstr::{BStr, ByteSlice};
use gale_base::log_level::Level;
use gale_config::{
    Body as BlockBody, Contexts, Custom, Diagnostic, ManyWith, One, OneWith, Setting, Statement, Takes, Word, slot,
    values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_http::configuration::builder::InHttp;
use gale_http::configuration::media_types::MediaTypes;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::filters::Change;
use gale_http::request::transform::{ROOM_BYTES, Step, Transform, Transformed, Until};
use gale_http::variables::VariableId;
use gale_http_upstream::AccelCharset;
use gale_protocol::response::ResponseField;
use gale_runtime::Effort;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_charset_filter",
    directives: &[
        Directive {
            name: "charset",
            contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "off",
            about: "Adds a charset to the Content-Type response header field; off adds none.",
            store: &OneWith { parse: charset, slot: slot!(Conf, charset) },
        },
        Directive {
            name: "source_charset",
            contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "",
            about: "Defines the original charset of responses, which are converted if charset is a different one.",
            store: &OneWith { parse: source_charset, slot: slot!(Conf, source_charset) },
        },
        Directive {
            name: "override_charset",
            contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables conversion of responses whose Content-Type already names a charset.",
            store: &One { parse: values::flag, slot: slot!(Conf, override_charset) },
        },
        Directive {
            name: "charset_types",
            contexts: Contexts::ANYWHERE,
            takes: Takes::AtLeast(1),
            body: BlockBody::None,
            default: "text/html text/xml text/plain text/vnd.wap.wml application/javascript application/rss+xml",
            about: "Sets the MIME types of responses that charsets are added to, in addition to text/html; * matches \
                    any type.",
            store: &ManyWith { parse: MediaTypes::parse, slot: slot!(Conf, charset_types) },
        },
        Directive {
            name: "charset_map",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(2),
            body: BlockBody::Block,
            default: "",
            about: "Defines the conversion table from one charset to another.",
            store: &Custom(add_map),
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart { filters: &[&Change { applies, run: convert }], ..HttpPart::EMPTY }],
};

const UTF_8: &[u8] = b"utf-8";

/// Size of the output buffer.
const PIECE_BYTES: usize = *ROOM_BYTES.end();

#[derive(Default)]
struct Conf {
    charset: Setting<Charset>,
    source_charset: Setting<Charset>,
    override_charset: Setting<bool>,
    charset_types: Setting<Vec<MediaTypes>>,
    /// The maps of the http block.
    maps: Vec<Arc<Map>>,
}

#[derive(Clone, Debug)]
enum Charset {
    Off,
    Named(Box<[u8]>),
    Variable(VariableId),
}

/// Always applies, since the response of an upstream server may name a charset.
fn applies(_: &Conf) -> bool {
    true
}

fn charset(builder: &mut Builder, statement: &Statement) -> Result<Charset, Diagnostic> {
    match &statement.args[0] {
        word if word.text == "off" => Ok(Charset::Off),
        _ => source_charset(builder, statement),
    }
}

fn source_charset(builder: &mut Builder, statement: &Statement) -> Result<Charset, Diagnostic> {
    let word = &statement.args[0];
    if !word.text.starts_with(b"$") {
        return Ok(Charset::Named(word.text.as_slice().into()));
    }
    let name = crate::shared::variable_name(word)?;
    Ok(Charset::Variable(builder.http_mut().variable(name, Some(word.span))))
}

/// Gives every scope the maps of the http block, and checks that there is a map for its conversion.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) else { return Ok(()) };
    conf.maps = parent.maps.clone();
    let (Charset::Named(to), Some(Charset::Named(from))) = (conf.charset.get(), conf.source_charset.get_opt()) else {
        return Ok(());
    };
    if from.eq_ignore_ascii_case(to) || conf.maps.iter().any(|map| map.conversion(from, to).is_some()) {
        return Ok(());
    }
    let message = no_map(from, to);
    Err(Diagnostic::emerg(message).at_opt(conf.source_charset.span().or(conf.charset.span())))
}

fn no_map(from: &[u8], to: &[u8]) -> String {
    format!("no \"charset_map\" between the charsets \"{}\" and \"{}\"", BStr::new(from), BStr::new(to))
}

/// The charset of the client's request, which the output of its subrequests gets, too; a note.
#[derive(Default)]
struct Shown(RefCell<Option<Box<[u8]>>>);

fn convert(request: &mut Request, conf: &Conf, body: &mut Body) {
    let is_off = matches!(conf.charset.get(), Charset::Off) && !conf.source_charset.is_set();
    if is_off && !(request.is_main() && request.notes.has::<AccelCharset>()) {
        return;
    }
    let Some(to) = destination(request, conf) else { return };
    let from = match charset_of(&request.response.content_type) {
        Some(own) => Some(own.into()),
        None => conf.source_charset.get_opt().map(|source| name_of(request, source)),
    };
    let Some(from) = from else { return show(request, &to) };
    if from.eq_ignore_ascii_case(&to) {
        return show(request, &to);
    }
    if request.response.field(ResponseField::ContentEncoding).is_some_and(|encoding| !encoding.is_empty()) {
        return;
    }
    let Some(conversion) = conf.maps.iter().find_map(|map| map.conversion(&from, &to)) else {
        return request.log(Level::Error, format_args!("{}", no_map(&from, &to)));
    };
    show(request, &to);
    if !conversion.keeps_length() {
        request.response.content_length = None;
        request.response.allows_ranges = false;
    }
    *body = conversion.around(std::mem::take(body));
}

/// Returns `true` if `charset` makes the response of this `Content-Type` UTF-8.
pub(super) fn is_utf8(request: &mut Request, content_type: &[u8]) -> bool {
    let configuration = std::rc::Rc::clone(request.configuration());
    let Some(conf) = configuration.http().scope(request.scope).conf_of::<Conf>() else { return false };
    let own = std::mem::replace(&mut request.response.content_type, content_type.into());
    let to = destination(request, conf);
    request.response.content_type = own;
    to.is_some_and(|to| to.eq_ignore_ascii_case(UTF_8))
}

/// Returns the charset of the response, if one is configured.
fn destination(request: &Request, conf: &Conf) -> Option<Box<[u8]>> {
    if !request.is_main() {
        return request.shared_note::<Shown>().0.borrow().clone();
    }
    let content_type = &request.response.content_type;
    if let Some(AccelCharset(name)) = request.notes.get() {
        return Some(name.as_slice().into()).filter(|_| !content_type.is_empty());
    }
    let is_wanted = match charset_of(content_type) {
        _ if content_type.is_empty() => false,
        Some(_) => *conf.override_charset.get(),
        None => MediaTypes::contain(conf.charset_types.get(), content_type),
    };
    if !is_wanted || matches!(conf.charset.get(), Charset::Off) {
        return None;
    }
    Some(name_of(request, conf.charset.get())).filter(|name| !name.is_empty())
}

fn name_of(request: &Request, charset: &Charset) -> Box<[u8]> {
    match charset {
        Charset::Off => Box::default(),
        Charset::Named(name) => name.clone(),
        Charset::Variable(id) => {
            let mut name = Vec::new();
            request.append_variable(*id, &mut name);
            name.into()
        }
    }
}

/// Returns the charset among the parameters of a media type.
fn charset_of(content_type: &[u8]) -> Option<&[u8]> {
    content_type.split(|&byte| byte == b';').skip(1).find_map(|parameter| {
        let (name, value) = parameter.trim_ascii().split_once_str("=")?;
        name.eq_ignore_ascii_case(b"charset").then(|| value.trim_with(|character| character == '"'))
    })
}

/// Adds the charset to `Content-Type`. Not for redirects: old browsers took it for the charset of the next page.
fn show(request: &mut Request, name: &[u8]) {
    if !request.is_main() {
        return;
    }
    let content_type = &mut request.response.content_type;
    if charset_of(content_type).is_some() {
        let end = content_type.find_byte(b';').unwrap_or(content_type.len());
        content_type.truncate(end);
    }
    if !matches!(request.response.status, 301 | 302) {
        content_type.extend_from_slice(b"; charset=");
        content_type.extend_from_slice(name);
        request.shared_note::<Shown>().0.replace(Some(name.into()));
    }
}

struct Map {
    first: Box<[u8]>,
    second: Box<[u8]>,
    tables: Tables,
}

enum Tables {
    Bytes { forth: Arc<[u8; 256]>, back: Arc<[u8; 256]> },
    Utf8 { forth: Arc<Utf8Table>, back: Arc<Pages> },
}

/// One or more characters, in up to three bytes.
#[derive(Clone, Copy, Default)]
struct Utf8Bytes {
    bytes: [u8; 3],
    length: u8,
}

/// UTF-8 text for each byte.
struct Utf8Table {
    rows: [Utf8Bytes; 256],
    /// `true` if ASCII maps to itself.
    keeps_ascii: bool,
}

/// Byte for each 16-bit character, or none: a page for each value of the upper 8 bits.
struct Pages([Option<Box<[Option<u8>; 256]>>; 256]);

impl Map {
    /// Returns the conversion from one charset to another, if this map has it.
    fn conversion(&self, from: &[u8], to: &[u8]) -> Option<Conversion> {
        let is_pair = |first: &[u8], second: &[u8]| from.eq_ignore_ascii_case(first) && to.eq_ignore_ascii_case(second);
        match &self.tables {
            Tables::Bytes { forth, .. } if is_pair(&self.first, &self.second) => {
                Some(Conversion::Bytes(Arc::clone(forth)))
            }
            Tables::Bytes { back, .. } if is_pair(&self.second, &self.first) => {
                Some(Conversion::Bytes(Arc::clone(back)))
            }
            Tables::Utf8 { forth, .. } if is_pair(&self.first, &self.second) => {
                Some(Conversion::ToUtf8(Arc::clone(forth)))
            }
            Tables::Utf8 { back, .. } if is_pair(&self.second, &self.first) => {
                Some(Conversion::FromUtf8(Arc::clone(back)))
            }
            _ => None,
        }
    }

    /// Returns `true` if the map is between these two, in either direction.
    fn is_between(&self, one: &[u8], other: &[u8]) -> bool {
        self.conversion(one, other).is_some()
    }
}

fn add_map(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let [first, second] = statement.args.as_slice() else { unreachable!("two arguments") };
    let names = format!("\"{}\" and \"{}\"", first.text, second.text);
    if first.text.eq_ignore_ascii_case(&second.text) {
        return Err(statement.error(format!("\"charset_map\" between the same charsets {names}")));
    }
    if first.text.eq_ignore_ascii_case(UTF_8) {
        let message = "\"charset_map\" with \"utf-8\" charset should be given in the second column";
        return Err(Diagnostic::emerg(message).at(first.span));
    }
    if conf.maps.iter().any(|map| map.is_between(&first.text, &second.text)) {
        return Err(statement.error(format!("duplicate \"charset_map\" between {names}")));
    }
    let (tables, errors) = match second.text.eq_ignore_ascii_case(UTF_8) {
        true => utf8_tables(statement.body()),
        false => byte_tables(statement.body()),
    };
    conf.maps.push(Arc::new(Map {
        first: first.text.as_slice().into(),
        second: second.text.as_slice().into(),
        tables,
    }));
    builder.note(errors);
    Ok(())
}

/// Reads the rows of a map between single-byte charsets. Without a row, ASCII maps to itself and all else is unknown.
fn byte_tables(rows: &[Statement]) -> (Tables, Vec<Diagnostic>) {
    let mut forth: [u8; 256] = std::array::from_fn(|byte| if byte < 128 { byte as u8 } else { b'?' });
    let mut back = forth;
    let mut errors = Vec::new();
    for row in rows {
        match codes(row).and_then(|(first, word)| Ok((first, code(word)?))) {
            Ok((first, second)) => {
                forth[usize::from(first)] = second;
                back[usize::from(second)] = first;
            }
            Err(error) => errors.push(error),
        }
    }
    (Tables::Bytes { forth: Arc::new(forth), back: Arc::new(back) }, errors)
}

fn utf8_tables(rows: &[Statement]) -> (Tables, Vec<Diagnostic>) {
    let mut forth: [Utf8Bytes; 256] = std::array::from_fn(|byte| {
        let byte = if byte < 128 { byte as u8 } else { b'?' };
        Utf8Bytes { bytes: [byte, 0, 0], length: 1 }
    });
    let mut back = Pages([const { None }; 256]);
    (0..128).for_each(|byte| back.set(byte.into(), byte));
    let mut errors = Vec::new();
    for row in rows {
        match codes(row).and_then(|(byte, word)| Ok((byte, utf8_code(word)?))) {
            Ok((byte, (bytes, character))) => {
                forth[usize::from(byte)] = bytes;
                back.set(character, byte);
            }
            Err(error) => errors.push(error),
        }
    }
    (Tables::Utf8 { forth: Arc::new(Utf8Table::new(forth)), back: Arc::new(back) }, errors)
}

/// Parses the code in a row's first column; also returns the second column.
fn codes(row: &Statement) -> Result<(u8, &Word), Diagnostic> {
    crate::shared::check_row(row)?;
    let [second] = row.args.as_slice() else { return Err(row.error("invalid parameters number")) };
    Ok((code(&row.name)?, second))
}

fn invalid_value(word: &Word) -> Diagnostic {
    let error = Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span);
    error.hint("a row has two codes in hexadecimal, such as: C0 FE; or, with utf-8, C0 D18E;")
}

/// Parses a hexadecimal byte.
fn code(word: &Word) -> Result<u8, Diagnostic> {
    let parsed = word.text.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    parsed.and_then(|text| u8::from_str_radix(text, 16).ok()).ok_or_else(|| invalid_value(word))
}

/// Parses hexadecimal UTF-8: up to three bytes, and the 16-bit character that they begin with.
fn utf8_code(word: &Word) -> Result<(Utf8Bytes, u16), Diagnostic> {
    let (pairs, []) = word.text.as_chunks::<2>() else { return Err(invalid_value(word)) };
    let mut utf8 = Utf8Bytes::default();
    for pair in pairs {
        let digits = [char::from(pair[0]).to_digit(16), char::from(pair[1]).to_digit(16)];
        let ([Some(high), Some(low)], Some(place)) = (digits, utf8.bytes.get_mut(usize::from(utf8.length))) else {
            return Err(invalid_value(word));
        };
        *place = (high << 4 | low) as u8;
        utf8.length += 1;
    }
    let valid = utf8.as_bytes().utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next());
    let character = valid.and_then(|character| u16::try_from(u32::from(character)).ok());
    Ok((utf8, character.ok_or_else(|| invalid_value(word))?))
}

impl Utf8Bytes {
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl Utf8Table {
    fn new(rows: [Utf8Bytes; 256]) -> Utf8Table {
        let keeps_ascii = (0..128_u8).all(|byte| rows[usize::from(byte)].as_bytes() == [byte]);
        Utf8Table { rows, keeps_ascii }
    }
}

impl Pages {
    fn set(&mut self, character: u16, byte: u8) {
        let [page, place] = character.to_be_bytes().map(usize::from);
        self.0[page].get_or_insert_with(|| Box::new([None; 256]))[place] = Some(byte);
    }

    fn get(&self, character: char) -> Option<u8> {
        let [page, place] = u16::try_from(u32::from(character)).ok()?.to_be_bytes().map(usize::from);
        self.0[page].as_ref()?[place]
    }
}

enum Conversion {
    Bytes(Arc<[u8; 256]>),
    ToUtf8(Arc<Utf8Table>),
    FromUtf8(Arc<Pages>),
}

impl Conversion {
    fn keeps_length(&self) -> bool {
        matches!(self, Conversion::Bytes(_))
    }

    /// Returns the body, converted as it is sent.
    fn around(self, body: Body) -> Body {
        Body::Stream(match self {
            Conversion::Bytes(table) => Box::new(ByteForByte { table, state: State::Whole(body) }),
            Conversion::ToUtf8(table) => Box::new(converting(body, ToUtf8(table))),
            Conversion::FromUtf8(pages) => Box::new(converting(body, FromUtf8 { pages, kept: [0; 4], kept_length: 0 })),
        })
    }
}

fn converting<E: Encoder>(body: Body, encoder: E) -> Transformed<Converting<E>> {
    Transformed::new(body, Converting { encoder, ready: Ready::default() }, PIECE_BYTES)
}

/// A body in which each byte is replaced by one other byte: its length stays the same, and ranges of it can be sent.
struct ByteForByte {
    table: Arc<[u8; 256]>,
    state: State,
}

enum State {
    Whole(Body),
    Converting(Box<Transformed<Converting<Bytes>>>),
}

impl BodyStream for ByteForByte {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if let State::Whole(body) = &mut self.state {
            let stream = converting(std::mem::take(body), Bytes(Arc::clone(&self.table)));
            self.state = State::Converting(Box::new(stream));
        }
        let State::Converting(stream) = &mut self.state else { unreachable!("it was begun") };
        stream.poll_next(request, context)
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        match &mut self.state {
            State::Whole(body) => body.poll_ahead(request, context),
            State::Converting(stream) => stream.poll_ahead(request, context),
        }
    }

    fn patience(&self, default: Duration) -> Duration {
        match &self.state {
            State::Whole(body) => body.patience(default),
            State::Converting(stream) => stream.patience(default),
        }
    }

    fn is_at_end(&self) -> bool {
        matches!(&self.state, State::Converting(stream) if stream.is_at_end())
    }

    fn length(&self) -> Option<u64> {
        match &self.state {
            State::Whole(body) => body.length(),
            State::Converting(_) => None,
        }
    }

    fn can_be_cut(&self) -> bool {
        matches!(&self.state, State::Whole(body) if body.can_be_cut())
    }

    fn cut(&mut self, cut: &mut dyn FnMut(Body) -> Body) {
        if let State::Whole(body) = &mut self.state {
            *body = cut(std::mem::take(body));
        }
    }
}

/// Output of one step that did not fit into the buffer: `&#1114111;` at most.
#[derive(Default)]
struct Ready {
    bytes: [u8; 10],
    from: usize,
    to: usize,
}

impl Ready {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[..bytes.len()].copy_from_slice(bytes);
        (self.from, self.to) = (0, bytes.len());
    }

    /// Moves as much as fits into the buffer. Returns its length.
    fn take(&mut self, room: &mut [u8]) -> usize {
        let length = room.len().min(self.to - self.from);
        room[..length].copy_from_slice(&self.bytes[self.from..self.from + length]);
        self.from += length;
        length
    }
}

/// An encoder that takes a byte or a character at a time.
trait Encoder {
    /// Takes a part of the non-empty input, and outputs at most as much as [`Ready`] holds. Returns the number of bytes
    /// taken.
    fn encode(&mut self, input: &[u8], ready: &mut Ready) -> usize;

    /// Outputs the replacement of an incomplete character at the end of the body.
    fn end(&mut self, _ready: &mut Ready) {}

    /// Converts input that needs no state, as long as the output certainly fits. Returns the numbers of bytes taken and
    /// written.
    fn encode_many(&self, input: &[u8], room: &mut [u8]) -> (usize, usize);
}

struct Converting<E> {
    encoder: E,
    ready: Ready,
}

impl<E: Encoder> Transform for Converting<E> {
    fn effort(&self) -> Effort {
        // The worst case is a character that becomes a number.
        Effort { usual_nanos: 3, worst_nanos: 100 }
    }

    fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError> {
        let mut step = Step { consumed: 0, produced: self.ready.take(room), units: 0, is_done: false };
        while step.produced < room.len() {
            let rest = &input[step.consumed..];
            if rest.is_empty() {
                if until == Until::End {
                    self.encoder.end(&mut self.ready);
                }
                let made = self.ready.take(&mut room[step.produced..]);
                step.produced += made;
                step.is_done = made == 0;
                break;
            }
            let room = &mut room[step.produced..];
            let (taken, made) = self.encoder.encode_many(rest, room);
            step.consumed += taken;
            step.produced += made;
            if taken == 0 {
                step.consumed += self.encoder.encode(rest, &mut self.ready);
                step.produced += self.ready.take(room);
            }
        }
        step.units = step.consumed;
        Ok(step)
    }
}

/// Copies the ASCII characters at the beginning, as far as there is room. Returns their number.
fn copy_ascii(input: &[u8], room: &mut [u8]) -> usize {
    let most = input.len().min(room.len());
    let plain = input[..most].find_non_ascii_byte().unwrap_or(most);
    room[..plain].copy_from_slice(&input[..plain]);
    plain
}

struct Bytes(Arc<[u8; 256]>);

impl Encoder for Bytes {
    fn encode(&mut self, input: &[u8], ready: &mut Ready) -> usize {
        ready.put(&[self.0[usize::from(input[0])]]);
        1
    }

    fn encode_many(&self, input: &[u8], room: &mut [u8]) -> (usize, usize) {
        let length = input.len().min(room.len());
        input.iter().zip(room).for_each(|(&byte, made)| *made = self.0[usize::from(byte)]);
        (length, length)
    }
}

struct ToUtf8(Arc<Utf8Table>);

impl Encoder for ToUtf8 {
    fn encode(&mut self, input: &[u8], ready: &mut Ready) -> usize {
        ready.put(self.0.rows[usize::from(input[0])].as_bytes());
        1
    }

    fn encode_many(&self, input: &[u8], room: &mut [u8]) -> (usize, usize) {
        let (mut taken, mut made) = (0, 0);
        while let (Some(&byte), Some(place)) = (input.get(taken), room.get_mut(made..made + 3)) {
            if byte.is_ascii() && self.0.keeps_ascii {
                let plain = copy_ascii(&input[taken..], &mut room[made..]);
                (taken, made) = (taken + plain, made + plain);
            } else {
                let row = &self.0.rows[usize::from(byte)];
                place.copy_from_slice(&row.bytes);
                (taken, made) = (taken + 1, made + usize::from(row.length));
            }
        }
        (taken, made)
    }
}

struct FromUtf8 {
    pages: Arc<Pages>,
    /// Bytes of an incomplete character.
    kept: [u8; 4],
    kept_length: usize,
}

impl Encoder for FromUtf8 {
    fn encode(&mut self, input: &[u8], ready: &mut Ready) -> usize {
        self.kept[self.kept_length] = input[0];
        self.kept_length += 1;
        let kept = &self.kept[..self.kept_length];
        match std::str::from_utf8(kept) {
            Ok(text) => {
                self.kept_length = 0;
                let character = text.chars().next().expect("the text is not empty");
                match self.pages.get(character) {
                    Some(byte) => ready.put(&[byte]),
                    None => {
                        let mut entity = [0; 10];
                        let mut rest = &mut entity[..];
                        write!(rest, "&#{};", u32::from(character)).expect("a character has at most seven digits");
                        let length = 10 - rest.len();
                        ready.put(&entity[..length]);
                    }
                }
                1
            }
            Err(error) if error.error_len().is_none() => 1,
            // The byte that does not continue the character is not taken: it begins the next one.
            Err(_) => {
                let taken = usize::from(self.kept_length == 1);
                self.kept_length = 0;
                ready.put(b"?");
                taken
            }
        }
    }

    fn end(&mut self, ready: &mut Ready) {
        if std::mem::take(&mut self.kept_length) > 0 {
            ready.put(b"?");
        }
    }

    fn encode_many(&self, input: &[u8], room: &mut [u8]) -> (usize, usize) {
        let (mut taken, mut made) = (0, 0);
        if self.kept_length > 0 {
            return (0, 0);
        }
        loop {
            let plain = copy_ascii(&input[taken..], &mut room[made..]);
            (taken, made) = (taken + plain, made + plain);
            let (character, length) = bstr::decode_utf8(&input[taken..]);
            let byte = character.and_then(|character| self.pages.get(character));
            let (Some(byte), Some(place)) = (byte, room.get_mut(made)) else { return (taken, made) };
            *place = byte;
            (taken, made) = (taken + length, made + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Converts input in all divisions and buffer sizes, and returns the output, which must not depend on them.
    fn converted<E: Encoder>(make: impl Fn() -> E, input: &[u8]) -> Vec<u8> {
        let mut results = Vec::new();
        for piece in 1..=input.len().max(1) {
            for room_bytes in [1, 2, 3, 11, 100] {
                let mut converting = Converting { encoder: make(), ready: Ready::default() };
                let mut out = Vec::new();
                let mut room = vec![0; room_bytes];
                for input in input.chunks(piece) {
                    let mut taken = 0;
                    while taken < input.len() {
                        let step = converting.step(&input[taken..], Until::MoreInput, &mut room).unwrap();
                        assert!(step.consumed > 0 || step.produced > 0);
                        taken += step.consumed;
                        out.extend_from_slice(&room[..step.produced]);
                    }
                }
                loop {
                    let step = converting.step(b"", Until::End, &mut room).unwrap();
                    out.extend_from_slice(&room[..step.produced]);
                    if step.is_done {
                        break;
                    }
                }
                results.push(out);
            }
        }
        results.dedup();
        assert_eq!(results.len(), 1, "it does not depend on the pieces");
        results.remove(0)
    }

    fn from_utf8(input: &[u8]) -> String {
        let make = || {
            let mut pages = Pages([const { None }; 256]);
            (0..128).for_each(|byte| pages.set(byte.into(), byte));
            pages.set('ж' as u16, b'Z');
            FromUtf8 { pages: Arc::new(pages), kept: [0; 4], kept_length: 0 }
        };
        String::from_utf8(converted(make, input)).unwrap()
    }

    #[test]
    fn characters_that_a_charset_lacks_become_numbers() {
        assert_eq!(from_utf8("aжb".as_bytes()), "aZb");
        assert_eq!(from_utf8("ж€жж𝄞\u{10ffff}".as_bytes()), "Z&#8364;ZZ&#119070;&#1114111;");
        assert_eq!(from_utf8(b""), "");
    }

    #[test]
    fn malformed_utf_8_becomes_question_marks_and_no_text_behind_it_is_lost() {
        assert_eq!(from_utf8(b"a\xd0<b>"), "a?<b>");
        assert_eq!(from_utf8(b"\xd0\xd0\xb6"), "?Z");
        assert_eq!(from_utf8(b"\xff\x80a\xe2\x82"), "??a?");
        assert_eq!(from_utf8(b"\xe2\x82\xc0"), "??");
        assert_eq!(from_utf8(b"\xed\xa0\x80"), "???");
    }

    #[test]
    fn bytes_become_bytes_or_characters() {
        let table: Arc<[u8; 256]> = Arc::new(std::array::from_fn(|byte| (byte as u8).wrapping_add(1)));
        assert_eq!(converted(|| Bytes(Arc::clone(&table)), b"HAL, and more than ten"), b"IBM-!boe!npsf!uibo!ufo");
        let mut table = [Utf8Bytes { bytes: [b'?', 0, 0], length: 1 }; 256];
        table[1] = Utf8Bytes { bytes: [0xe2, 0x82, 0xac], length: 3 };
        let mut ascii = table;
        let table = Arc::new(Utf8Table::new(table));
        assert_eq!(converted(|| ToUtf8(Arc::clone(&table)), b"\x01\x02\x01"), "€?€".as_bytes());
        (0..128).for_each(|byte: u8| ascii[usize::from(byte)] = Utf8Bytes { bytes: [byte, 0, 0], length: 1 });
        ascii[128] = Utf8Bytes { bytes: [0xe2, 0x82, 0xac], length: 3 };
        let table = Arc::new(Utf8Table::new(ascii));
        assert!(table.keeps_ascii);
        let text = b"some text \x80\x80, and \xff more";
        assert_eq!(converted(|| ToUtf8(Arc::clone(&table)), text), "some text €€, and ? more".as_bytes());
    }

    #[test]
    fn the_charset_of_a_media_type_is_found_among_its_parameters() {
        assert_eq!(charset_of(b"text/html; charset=utf-8"), Some(&b"utf-8"[..]));
        assert_eq!(charset_of(b"text/html;a=b; Charset=\"x\" ;c"), Some(&b"x"[..]));
        assert_eq!(charset_of(b"text/html"), None);
        assert_eq!(charset_of(b"charset=a"), None);
    }
}
