//! The events do not depend on how the input is split.

use std::sync::Arc;

use gale_protocol::http2::frame::frame_type::*;
use gale_protocol::http2::{Connection, Limits};
use proptest::prelude::*;

use crate::peer::*;

fn any_frame() -> impl Strategy<Value = Frames> {
    let none = Frames::default;
    let id = prop::sample::select(vec![0u32, 1, 3, 5, 7, 2]);
    let bytes = prop::collection::vec(any::<u8>(), 0..40);
    let usual = (prop::sample::select(vec![1u32, 3, 5, 7, 9]), any::<bool>(), 0..5u8, bytes.clone());
    prop_oneof![
        4 => usual.prop_map(move |(id, end, kind, data)| match kind {
            0 => none().get(id),
            1 => none().post(id),
            2 => none().data(id, u8::from(end), data),
            3 => none().headers(id, 5, &[("x", "y")]),
            _ => none().headers(id, u8::from(end), GET).frame(CONTINUATION, 4, id, block(&[("z", "z")])),
        }),
        2 => (id, prop::sample::select(vec![DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE,
                                           CONTINUATION, PRIORITY_UPDATE, 2, 0xee]), any::<u8>(), bytes)
            .prop_map(move |(id, frame_type, flags, payload)| none().frame(frame_type, flags, id, payload)),
        1 => prop::collection::vec((0..10u16, any::<u32>()), 0..4).prop_map(move |settings| none().settings(&settings)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn splitting_makes_no_difference(
        frames in prop::collection::vec(any_frame(), 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        is_client in any::<bool>(),
    ) {
        let mut input = if is_client { Frames::server() } else { Frames::client() }.0;
        frames.iter().for_each(|frames| input.extend_from_slice(&frames.0));
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(input.len() + 1)).collect();
        cuts.extend([0, input.len()]);
        cuts.sort();
        let every: Vec<usize> = (0..=input.len()).collect();
        let run = |cuts: &[usize]| {
            let limits = Arc::new(Limits::default());
            let connection = if is_client { Connection::client(limits) } else { Connection::server(limits) };
            let mut reader = Reader::of(connection);
            let mut result = Ok(());
            for ends in cuts.windows(2) {
                result = reader.read(&input[ends[0]..ends[1]]);
                if result.is_err() {
                    break;
                }
            }
            let sent = reader.sent();
            (reader.seen, result, sent, reader.connection.open_streams())
        };
        let whole = run(&[0, input.len()]);
        prop_assert_eq!(&whole.0, &run(&cuts).0);
        let bytes = run(&every);
        prop_assert_eq!(&whole.0, &bytes.0);
        prop_assert_eq!(whole.1, bytes.1);
        prop_assert_eq!(whole.3, bytes.3);
    }
}
