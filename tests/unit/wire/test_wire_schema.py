"""Our protobuf schema is the one the SDK speaks, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from tinker.proto import tinker_public_pb2

from descant.wire import tinker_pb2

OURS = tinker_pb2.DESCRIPTOR
SDKS = tinker_public_pb2.DESCRIPTOR


def relative(full_name: str, package: str) -> str:
    return full_name.removeprefix(package + ".")


def describe_message(message: Descriptor, package: str) -> dict[str, Any]:
    return {
        "is_map_entry": message.GetOptions().map_entry,
        "oneofs": {oneof.name: [field.name for field in oneof.fields] for oneof in message.oneofs},
        "fields": {
            field.name: {
                "number": field.number,
                "type": field.type,
                "repeated": field.is_repeated,
                "has_presence": field.has_presence,
                "packed": field.is_packed,
                "message": relative(field.message_type.full_name, package) if field.message_type else None,
                "enum": relative(field.enum_type.full_name, package) if field.enum_type else None,
            }
            for field in message.fields
        },
        "nested": {nested.name: describe_message(nested, package) for nested in message.nested_types},
    }


def describe_enum(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def test_same_messages_and_enums():
    assert set(OURS.message_types_by_name) == set(SDKS.message_types_by_name)
    assert set(OURS.enum_types_by_name) == set(SDKS.enum_types_by_name)


@pytest.mark.parametrize("name", sorted(SDKS.message_types_by_name))
def test_message_is_the_sdks(name: str):
    ours = describe_message(OURS.message_types_by_name[name], OURS.package)
    assert ours == describe_message(SDKS.message_types_by_name[name], SDKS.package)


@pytest.mark.parametrize("name", sorted(SDKS.enum_types_by_name))
def test_enum_is_the_sdks(name: str):
    assert describe_enum(OURS.enum_types_by_name[name]) == describe_enum(SDKS.enum_types_by_name[name])


def test_both_live_in_one_process():
    assert OURS.package != SDKS.package
    assert OURS.name != SDKS.name


def test_the_generated_module_is_of_this_schema(tmp_path: Path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    compiled = tmp_path / "descriptors"
    source = Path(tinker_pb2.__file__).with_name("tinker.proto")
    root = source.parents[2]
    name = str(source.relative_to(root))
    assert protoc.main(["", f"-I{root}", f"--descriptor_set_out={compiled}", name]) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    pool = DescriptorPool()
    pool.Add(file)
    schema = pool.FindFileByName(name)
    for ours, theirs in ((OURS, schema), (schema, OURS)):
        for message in ours.message_types_by_name.values():
            other = theirs.message_types_by_name[message.name]
            assert describe_message(message, OURS.package) == describe_message(other, OURS.package)
        for enum in ours.enum_types_by_name.values():
            assert describe_enum(enum) == describe_enum(theirs.enum_types_by_name[enum.name])
