//! geo: a variable whose value depends on the client's address.
//!   geo [$ADDRESS] $VARIABLE { [ranges;] [default VALUE;] [delete NETWORK;] [include FILE;] [volatile;]
//!                              NETWORK VALUE; ... }                                        http, stream
//! (<https://nginx.org/en/docs/http/ngx_http_geo_module.html>)
//!
//! The networks or ranges of the block are flattened when it is read: a request searches one sorted list of the
//! addresses at which the value changes.
//!
//! ```text
//!   0.0.0.0/0 a, 10.0.0.0/8 b, 10.1.0.0/16 c      0.0.0.0 a  10.0.0.0 b  10.1.0.0 c  10.2.0.0 b  11.0.0.0 a
//! ```
//!
//! nginx's binary database (`FILE.bin`) is neither read nor written.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bstr::BStr;
use gale_base::cidr::Cidr;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes, Word};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::{Definition, VariableId};

use super::{check_row, variable_name};

/// Returns the directive for blocks in `contexts`.
pub const fn directive<S: Subject, F: Forwarding<S>>(contexts: Contexts) -> Directive {
    Directive {
        name: "geo",
        contexts,
        takes: Takes::Between(1, 2),
        body: Body::Block,
        default: "",
        about: "Creates a variable whose value depends on the client IP address.",
        store: &Custom(geo::<S, F>),
    }
}

/// A protocol's way to get the client's address from a proxy; `()` for protocols without one.
pub trait Forwarding<S>: Default + Send + Sync + 'static {
    /// Takes a row of the block. Returns `false` if the row is not one of the protocol's own.
    ///
    /// # Errors
    /// The row is invalid. Warnings are added to the notes.
    fn add(&mut self, row: &Statement, notes: &mut Vec<Diagnostic>) -> Result<bool, Diagnostic>;

    /// Returns the address of the client behind this one, or `None` if there is none or this address is not trusted.
    fn client(&self, subject: &S, address: IpAddr) -> Option<IpAddr>;
}

impl<S> Forwarding<S> for () {
    fn add(&mut self, _: &Statement, _: &mut Vec<Diagnostic>) -> Result<bool, Diagnostic> {
        Ok(false)
    }

    fn client(&self, _: &S, _: IpAddr) -> Option<IpAddr> {
        None
    }
}

/// Address of a client that has none, such as one on a UNIX-domain socket.
const NO_ADDRESS: Ipv4Addr = Ipv4Addr::BROADCAST;

struct Geo<F> {
    /// The variable with the address; `None` for the client's own.
    source: Option<VariableId>,
    forwarding: F,
    v4: Changes<u32>,
    /// `None` with `ranges`, which are IPv4 only.
    v6: Option<Changes<u128>>,
    values: Vec<Box<[u8]>>,
}

impl<S: Subject, F: Forwarding<S>> Definition<S> for Geo<F> {
    fn append(&self, subject: &S, out: &mut Vec<u8>) -> bool {
        let value = match (self.address(subject), &self.v6) {
            (Some(IpAddr::V4(address)), _) => self.v4.value_at(address.to_bits()),
            (Some(IpAddr::V6(address)), Some(v6)) => v6.value_at(address.to_bits()),
            (Some(IpAddr::V6(_)) | None, _) => self.v4.value_at(NO_ADDRESS.to_bits()),
        };
        out.extend_from_slice(&self.values[value]);
        true
    }

    fn is_own(&self) -> bool {
        true
    }
}

impl<F> Geo<F> {
    fn address<S: Subject>(&self, subject: &S) -> Option<IpAddr>
    where
        F: Forwarding<S>,
    {
        let address = match self.source {
            None => subject.remote().inet().map(|address| address.ip()),
            Some(source) => {
                let mut text = Vec::new();
                subject.append_variable(source, &mut text);
                std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok())
            }
        };
        let address = address.map(|address: IpAddr| address.to_canonical())?;
        self.forwarding.client(subject, address).or(Some(address))
    }
}

/// The addresses at which the value changes, in order; the first one is 0.
struct Changes<A> {
    starts: Vec<A>,
    values: Vec<u32>,
}

impl<A: Copy + Ord> Changes<A> {
    fn value_at(&self, address: A) -> usize {
        let after = self.starts.partition_point(|&start| start <= address);
        self.values[after - 1] as usize
    }

    /// Flattens ranges, each of which lies within another one or beside it; of ranges with the same start, the outer
    /// ones come first. `narrow` converts an address from the widest type.
    fn new(ranges: impl IntoIterator<Item = Range>, default: u32, narrow: fn(u128) -> A) -> Changes<A> {
        let mut changes = Changes { starts: vec![narrow(0)], values: vec![default] };
        // The ranges around the current address, the innermost last.
        let mut around: Vec<Range> = Vec::new();
        for range in ranges {
            changes.leave(&mut around, Some(range.start), default, narrow);
            changes.push(narrow(range.start), range.value);
            around.push(range);
        }
        changes.leave(&mut around, None, default, narrow);
        changes
    }

    /// Closes the ranges that end before the address, or all of them.
    fn leave(&mut self, around: &mut Vec<Range>, before: Option<u128>, default: u32, narrow: fn(u128) -> A) {
        while let Some(ended) = around.pop_if(|range| before.is_none_or(|before| range.end < before)) {
            // The range of all addresses has no address behind its end.
            if let Some(next) = ended.end.checked_add(1)
                && (size_of::<A>() == size_of::<u128>() || next <= u128::from(u32::MAX))
            {
                self.push(narrow(next), around.last().map_or(default, |range| range.value));
            }
        }
    }

    fn push(&mut self, start: A, value: u32) {
        if self.starts.last() == Some(&start) {
            *self.values.last_mut().expect("each start has a value") = value;
        } else if self.values.last() != Some(&value) {
            self.starts.push(start);
            self.values.push(value);
        }
    }
}

/// A range of addresses, both ends included, and the index of its value.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: u128,
    end: u128,
    value: u32,
}

fn geo<S: Subject, F: Forwarding<S>>(
    _: &mut (),
    builder: &mut Builder,
    statement: &Statement,
) -> Result<(), Diagnostic> {
    let variables = builder.variables::<S>();
    let (source, variable) = match statement.args.as_slice() {
        [source, variable] => (Some(variables.variable(variable_name(source)?, Some(source.span))), variable),
        [variable, ..] => (None, variable),
        [] => unreachable!("one argument at least"),
    };
    let name = variable_name(variable)?;
    let mut forwarding = F::default();
    let (draft, notes) = Draft::read(statement.body(), |row, notes| forwarding.add(row, notes));
    let is_volatile = draft.is_volatile;
    variables.table.define(name, Some(variable.span), Arc::new(draft.geo(source, forwarding)), is_volatile);
    builder.note(notes);
    Ok(())
}

/// A block that is being parsed.
#[derive(Default)]
struct Draft<'s> {
    values: Vec<Box<[u8]>>,
    /// Indices of the values so far, by text.
    known: HashMap<&'s [u8], u32>,
    /// The default value; the first value, which is empty, unless it is set.
    default: Option<u32>,
    networks: Networks,
    ranges: Option<Ranges>,
    is_volatile: bool,
}

/// Networks by first address and length: sorted, outer ones before inner ones.
#[derive(Default)]
struct Networks {
    v4: BTreeMap<(u32, u8), u32>,
    v6: BTreeMap<(u128, u8), u32>,
    is_begun: bool,
}

impl<'s> Draft<'s> {
    /// Reads the rows that `others` does not take, and collects the errors.
    fn read(
        rows: &'s [Statement],
        mut others: impl FnMut(&Statement, &mut Vec<Diagnostic>) -> Result<bool, Diagnostic>,
    ) -> (Draft<'s>, Vec<Diagnostic>) {
        let mut draft =
            Draft { values: vec![Box::default()], known: HashMap::from([(&b""[..], 0)]), ..Draft::default() };
        let mut notes = Vec::new();
        for row in rows {
            let taken = check_row(row).and_then(|()| others(row, &mut notes));
            let added = taken.and_then(|is_taken| if is_taken { Ok(()) } else { draft.add(row, &mut notes) });
            notes.extend(added.err());
        }
        (draft, notes)
    }

    fn add(&mut self, row: &'s Statement, notes: &mut Vec<Diagnostic>) -> Result<(), Diagnostic> {
        match (&**row.name.text, row.args.as_slice()) {
            (b"ranges", []) => {
                if self.networks.is_begun {
                    let message = "the \"ranges\" directive must be the first directive inside \"geo\" block";
                    return Err(row.error(message));
                }
                self.ranges.get_or_insert_default();
            }
            (b"volatile", []) => self.is_volatile = true,
            (b"default", [value]) => {
                let value = self.value(value);
                let earlier = self.default.replace(value);
                self.networks.is_begun |= self.ranges.is_none();
                if let Some(earlier) = earlier {
                    let what = if self.ranges.is_some() { "default geo range" } else { "network \"default\"," };
                    notes.push(self.duplicate(row, what, value, earlier));
                }
            }
            (_, [word]) if self.ranges.is_some() => self.add_range(row, word, notes)?,
            (b"delete", [network]) => {
                self.networks.is_begun = true;
                if self.networks.remove(parse_network(network, notes)?).is_none() {
                    let message = format!("no network \"{}\" to delete", network.text);
                    notes.push(Diagnostic::warn(message).at(network.span));
                }
            }
            (_, [value]) => {
                self.networks.is_begun = true;
                let network = parse_network(&row.name, notes)?;
                let value = self.value(value);
                if let Some(earlier) = self.networks.insert(network, value) {
                    let what = format!("network \"{}\",", row.name.text);
                    notes.push(self.duplicate(row, &what, value, earlier));
                }
            }
            _ => return Err(row.error("invalid number of the geo parameters")),
        }
        Ok(())
    }

    /// Adds or deletes a range, in a block of ranges.
    fn add_range(&mut self, row: &'s Statement, word: &'s Word, notes: &mut Vec<Diagnostic>) -> Result<(), Diagnostic> {
        let is_deletion = row.name.text == "delete";
        let written = if is_deletion { word } else { &row.name };
        let invalid = || Diagnostic::emerg(format!("invalid range \"{}\"", written.text)).at(written.span);
        let (start, end) = parse_range(&written.text).ok_or_else(invalid)?;
        let value = if is_deletion { 0 } else { self.value(word) };
        let ranges = self.ranges.as_mut().expect("a block of ranges");
        if is_deletion {
            if !ranges.remove(start, end) {
                let message = format!("no address range \"{}\" to delete", written.text);
                notes.push(Diagnostic::warn(message).at(written.span));
            }
            return Ok(());
        }
        let earlier = ranges.insert(start, end, value).map_err(|(start, end)| {
            let (start, end) = (Ipv4Addr::from_bits(start), Ipv4Addr::from_bits(end));
            let message = format!("range \"{}\" overlaps \"{start}-{end}\"", written.text);
            Diagnostic::emerg(message).at(written.span)
        })?;
        if let Some(earlier) = earlier {
            let what = format!("range \"{}\",", written.text);
            notes.push(self.duplicate(row, &what, value, earlier));
        }
        Ok(())
    }

    fn duplicate(&self, row: &Statement, what: &str, value: u32, earlier: u32) -> Diagnostic {
        let [value, earlier] = [value, earlier].map(|value| BStr::new(&self.values[value as usize]));
        let message = format!("duplicate {what} value: \"{value}\", old value: \"{earlier}\"");
        Diagnostic::warn(message).at(row.name.span)
    }

    fn value(&mut self, word: &'s Word) -> u32 {
        let next = u32::try_from(self.values.len()).expect("fewer values than the words of a configuration");
        let text: &[u8] = &word.text;
        let number = *self.known.entry(text).or_insert(next);
        if number == next {
            self.values.push(text.into());
        }
        number
    }

    fn geo<F>(self, source: Option<VariableId>, forwarding: F) -> Geo<F> {
        let default = self.default.unwrap_or_default();
        let (v4, v6) = match &self.ranges {
            Some(ranges) => (Changes::new(ranges.iter(), default, narrow), None),
            None => (
                Changes::new(self.networks.ranges_of_v4(), default, narrow),
                Some(Changes::new(self.networks.ranges_of_v6(), default, |address| address)),
            ),
        };
        Geo { source, forwarding, v4, v6, values: self.values }
    }
}

fn narrow(address: u128) -> u32 {
    u32::try_from(address).expect("an address of IPv4")
}

impl Networks {
    /// Inserts a network. Returns the value that the same network had before.
    fn insert(&mut self, network: Cidr, value: u32) -> Option<u32> {
        match network.address() {
            IpAddr::V4(address) => self.v4.insert((address.to_bits(), network.length()), value),
            IpAddr::V6(address) => self.v6.insert((address.to_bits(), network.length()), value),
        }
    }

    fn remove(&mut self, network: Cidr) -> Option<u32> {
        match network.address() {
            IpAddr::V4(address) => self.v4.remove(&(address.to_bits(), network.length())),
            IpAddr::V6(address) => self.v6.remove(&(address.to_bits(), network.length())),
        }
    }

    fn ranges_of_v4(&self) -> impl Iterator<Item = Range> {
        let range = |(&(start, length), &value): (&(u32, u8), &u32)| {
            let host_bits = u32::MAX.checked_shr(length.into()).unwrap_or(0);
            Range { start: start.into(), end: (start | host_bits).into(), value }
        };
        self.v4.iter().map(range)
    }

    fn ranges_of_v6(&self) -> impl Iterator<Item = Range> {
        let range = |(&(start, length), &value): (&(u128, u8), &u32)| {
            let host_bits = u128::MAX.checked_shr(length.into()).unwrap_or(0);
            Range { start, end: start | host_bits, value }
        };
        self.v6.iter().map(range)
    }
}

/// Ranges of IPv4 addresses by first address, without overlaps. As in nginx a range is stored in pieces, one for each
/// block of 65536 addresses; each piece is divided or deleted by itself.
#[derive(Default)]
struct Ranges(BTreeMap<u32, Piece>);

#[derive(Clone, Copy)]
struct Piece {
    end: u32,
    value: u32,
}

impl Ranges {
    /// Adds a range, which may lie within another one. Returns the value that the same range had before, or as an error
    /// the range that overlaps.
    fn insert(&mut self, start: u32, end: u32, value: u32) -> Result<Option<u32>, (u32, u32)> {
        let mut same = None;
        for (start, end) in pieces(start, end) {
            same = self.insert_piece(start, end, value)?.or(same);
        }
        Ok(same)
    }

    fn insert_piece(&mut self, start: u32, end: u32, value: u32) -> Result<Option<u32>, (u32, u32)> {
        let piece = Piece { end, value };
        let last = self.0.range(..=end).next_back().map(|(&start, &piece)| (start, piece));
        let Some((outer_start, outer)) = last.filter(|(_, outer)| outer.end >= start) else {
            self.0.insert(start, piece);
            return Ok(None);
        };
        if (outer_start, outer.end) == (start, end) {
            self.0.insert(start, piece);
            return Ok(Some(outer.value));
        }
        if start < outer_start || end > outer.end {
            return Err((outer_start, outer.end));
        }
        if outer_start < start {
            self.0.insert(outer_start, Piece { end: start - 1, ..outer });
        }
        if end < outer.end {
            self.0.insert(end + 1, outer);
        }
        self.0.insert(start, piece);
        Ok(None)
    }

    /// Removes a range. Returns `true` if every piece of it existed in exactly this form.
    fn remove(&mut self, start: u32, end: u32) -> bool {
        let mut is_whole = true;
        for (start, end) in pieces(start, end) {
            if self.0.get(&start).is_some_and(|piece| piece.end == end) {
                self.0.remove(&start);
            } else {
                is_whole = false;
            }
        }
        is_whole
    }

    fn iter(&self) -> impl Iterator<Item = Range> {
        self.0.iter().map(|(&start, piece)| Range { start: start.into(), end: piece.end.into(), value: piece.value })
    }
}

/// Returns the parts of a range in each block: at most 65536.
fn pieces(start: u32, end: u32) -> impl Iterator<Item = (u32, u32)> {
    (start >> 16..=end >> 16).map(move |block| (start.max(block << 16), end.min(block << 16 | 0xffff)))
}

fn parse_range(text: &[u8]) -> Option<(u32, u32)> {
    let (start, end) = std::str::from_utf8(text).ok()?.split_once('-')?;
    let (start, end): (Ipv4Addr, Ipv4Addr) = (start.parse().ok()?, end.parse().ok()?);
    (start <= end).then_some((start.to_bits(), end.to_bits()))
}

/// Parses a network. Bits beyond its length lead to a warning in the notes.
///
/// # Errors
/// The word is not a network.
pub fn parse_network(word: &Word, notes: &mut Vec<Diagnostic>) -> Result<Cidr, Diagnostic> {
    let invalid = || Diagnostic::emerg(format!("invalid network \"{}\"", word.text)).at(word.span);
    let (network, has_low_bits) = Cidr::parse(&word.text).ok_or_else(invalid)?;
    if has_low_bits {
        let message = format!("low address bits of {} are meaningless", word.text);
        notes.push(Diagnostic::warn(message).at(word.span));
    }
    Ok(network)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn network(start: u32, length: u8) -> Cidr {
        let text = format!("{}/{length}", Ipv4Addr::from_bits(start));
        Cidr::parse(text.as_bytes()).expect("a network").0
    }

    /// Finds the value of the smallest network by a linear search.
    fn smallest(networks: &Networks, address: u32) -> u32 {
        let around = networks
            .v4
            .iter()
            .filter(|((start, length), _)| network(*start, *length).contains(Ipv4Addr::from_bits(address).into()));
        around.max_by_key(|((_, length), _)| *length).map_or(0, |(_, value)| *value)
    }

    proptest! {
        #[test]
        fn flattened_table_agrees_with_the_networks(
            rows in prop::collection::vec((any::<u32>(), 0..=32_u8, 1..5_u32, any::<bool>()), 0..40),
            others in prop::collection::vec(any::<u32>(), 0..20),
        ) {
            let mut networks = Networks::default();
            for (start, length, value, is_deletion) in &rows {
                // Only a few bits differ, so that networks lie within each other.
                let network = network(start & 0xc00f_0003, *length);
                if *is_deletion { networks.remove(network); } else { networks.insert(network, *value); }
            }
            let changes = Changes::new(networks.ranges_of_v4(), 0, narrow);
            prop_assert!(changes.starts.is_sorted_by(|one, other| one < other));
            let edges = networks.v4.keys().flat_map(|(start, length)| {
                let end = start | u32::MAX.checked_shr(u32::from(*length)).unwrap_or(0);
                [*start, start.wrapping_sub(1), end, end.wrapping_add(1)]
            });
            for address in edges.chain(others) {
                prop_assert_eq!(changes.value_at(address), smallest(&networks, address) as usize);
            }
        }

        #[test]
        fn last_range_with_an_address_counts(
            rows in prop::collection::vec((0..48_u32, 0..48_u32, 1..5_u32, prop::bool::weighted(0.2)), 0..40),
        ) {
            // Around the border of two blocks, where ranges are divided.
            const FIRST: u32 = 0x0a01_0000 - 24;
            let mut ranges = Ranges::default();
            let mut model = [0; 48];
            for (start, length, value, is_deletion) in rows {
                let end = (start + length).min(47);
                let before = ranges.0.clone();
                let (first, last) = (FIRST + start, FIRST + end);
                if is_deletion {
                    let is_there =
                        |(start, end): &(_, _)| before.get(start).is_some_and(|piece| piece.end == *end);
                    let pieces_there: Vec<_> = pieces(first, last).filter(is_there).collect();
                    prop_assert_eq!(ranges.remove(first, last), pieces_there.len() == pieces(first, last).count());
                    for (start, end) in pieces_there {
                        model[(start - FIRST) as usize..=(end - FIRST) as usize].fill(0);
                    }
                } else if ranges.insert(first, last, value).is_ok() {
                    model[start as usize..=end as usize].fill(value);
                } else {
                    // Such a configuration is rejected, so the pieces added so far do not count.
                    ranges.0 = before;
                }
            }
            let changes = Changes::new(ranges.iter(), 0, narrow);
            for (offset, value) in model.iter().enumerate() {
                prop_assert_eq!(changes.value_at(FIRST + offset as u32), *value as usize);
            }
            prop_assert_eq!(changes.value_at(0), 0);
            prop_assert_eq!(changes.value_at(u32::MAX), 0);
        }
    }

    #[test]
    fn the_whole_of_the_addresses_has_no_end() {
        let mut networks = Networks::default();
        networks.insert(network(0, 0), 1);
        networks.insert(network(u32::MAX, 32), 2);
        networks.insert(Cidr::parse(b"::/0").unwrap().0, 3);
        networks.insert(Cidr::parse(b"ffff::/16").unwrap().0, 4);
        let v4 = Changes::new(networks.ranges_of_v4(), 0, narrow);
        assert_eq!((v4.value_at(0), v4.value_at(u32::MAX - 1), v4.value_at(u32::MAX)), (1, 1, 2));
        let v6 = Changes::new(networks.ranges_of_v6(), 0, |address| address);
        assert_eq!((v6.value_at(0), v6.value_at(u128::MAX)), (3, 4));
    }
}
