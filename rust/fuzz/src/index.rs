//! Index contents that nobody wrote on purpose: wholly random, or a sound index with a few words changed.
//!
//! Every operation must return, and after a rebuild nothing may be wrong.

use arbitrary::{Arbitrary, Unstructured};
use ecpool_core::geometry::{Geometry, GeometryRequest};
use ecpool_core::index::{Index, IndexLayout};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::poke::poke;
use crate::random_bytes;

#[derive(Debug, Arbitrary)]
enum Content {
    Random { seed: u64 },
    Changed { operations: u8, patches: Vec<Patch> },
}

#[derive(Debug, Arbitrary)]
struct Patch {
    at: u32,
    with: Word,
}

/// What a word becomes: values that mean something in an index are more telling than any others.
#[derive(Debug, Arbitrary)]
enum Word {
    Any(u64),
    Small(u8),
    Flip(u8),
    CopyOf(u32),
}

#[derive(Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

struct Memory {
    lines: Vec<Line>,
    layout: IndexLayout,
}

impl Memory {
    fn new() -> Self {
        let request =
            GeometryRequest { capacity: 24 * 4096, block_size: 4096, segment_size: 2 << 20, num_slots: Some(6) };
        let layout = IndexLayout::of(&Geometry::new(&request).expect("it is allowed"));
        let lines = Line::new_vec_zeroed(layout.total_len() / 64 + 1).expect("it is small");
        Self { lines, layout }
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.lines.as_mut_slice().as_mut_bytes()
    }

    fn index(&mut self) -> Index<'_> {
        Index::view(&self.layout, self.lines.as_mut_slice().as_mut_bytes()).expect("it is large enough and aligned")
    }

    fn patch(&mut self, patch: &Patch) {
        let bytes = self.bytes();
        let words = bytes.len() / 8;
        let place = |at: u32| (at as usize % words) * 8;
        let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let at = place(patch.at);
        let new = match patch.with {
            Word::Any(value) => value,
            Word::Small(value) => u64::from(value),
            Word::Flip(bit) => word(bytes, at) ^ (1 << (bit % 64)),
            Word::CopyOf(other) => word(bytes, place(other)),
        };
        bytes[at..at + 8].copy_from_slice(&new.to_le_bytes());
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut source = Unstructured::new(data);
    let Ok(content) = Content::arbitrary(&mut source) else { return };
    let ids: Vec<u64> = source.arbitrary_iter().map(|ids| ids.flatten().take(8).collect()).unwrap_or_default();
    let mut memory = Memory::new();
    match content {
        Content::Random { seed } => {
            let len = memory.bytes().len();
            memory.bytes().copy_from_slice(&random_bytes(seed, len));
        }
        Content::Changed { operations, patches } => {
            memory.index().initialise(7).expect("zeros become an empty index");
            (0..operations % 3).for_each(|_| poke(&mut memory.index(), &[]));
            patches.iter().for_each(|patch| memory.patch(patch));
        }
    }
    let mut index = memory.index();
    poke(&mut index, &ids);
    index.rebuild(7).expect("any content can be rebuilt");
    assert_eq!(index.violations(), Vec::<String>::new(), "after a rebuild");
    poke(&mut index, &ids);
    assert_eq!(index.violations(), Vec::<String>::new(), "after operations on what was rebuilt");
}
